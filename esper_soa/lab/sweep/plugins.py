"""The folder of a sweep, limits of it and its jobs, needs of Hydra's launchers. No torch."""

import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from esper_soa.config.paths import user_path
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from esper_soa.system.errors import UserError, check
from esper_soa.training.files.run_folder import (
    RUNS_FOLDER,
    dated_folders,
    make_dated_folder,
    writable,
)
from esper_soa.training.start.begin import launched_rank, requested_folder

SWEEP_PREFIX = "sweep_"  # before the time in the name of a sweep's folder
# Plugins of our own, which Hydra looks for under that name.
PLUGIN_PACKAGE = "hydra_plugins.esper_soa_sweeps"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
SUBMITIT_LAUNCHERS = {
    f"{SUBMITIT}LocalLauncher": f"{PLUGIN_PACKAGE}.submitit.LocalJobs",
    f"{SUBMITIT}SlurmLauncher": f"{PLUGIN_PACKAGE}.submitit.SlurmJobs",
}
LAUNCHERS = SUBMITIT_LAUNCHERS | {
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": (
        f"{PLUGIN_PACKAGE}.joblib.JoblibJobs"
    ),
}
CHOSEN_BY = re.compile(r"(hydra/launcher|hydra/sweeper|\+sweep)=\[?([\w,]+)")
# The module that a choice needs, and the extra that brings it.
SUBMITIT_PLUGIN = ("hydra_plugins.hydra_submitit_launcher", "sweep")
PLUGINS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "sweep"),
    "submitit_local": SUBMITIT_PLUGIN,
    "submitit_slurm": SUBMITIT_PLUGIN,
    "slurm": SUBMITIT_PLUGIN,
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "optuna": ("optuna", "sweep"),
    "optuna_search": ("optuna", "sweep"),
}


def check_plugins(arguments: Sequence[str]) -> None:
    """Raise UserError where the command line chooses a launcher or sweeper not installed."""
    for match in filter(None, map(CHOSEN_BY.match, arguments)):
        for name in match[2].split(","):
            module, extra = PLUGINS.get(name, ("", ""))
            if module and find_spec(module) is None:
                raise UserError(
                    f"{match[1]}={name}: {module} is not installed. "
                    f"Install the extra: pip install 'esper-soa[{extra}]'"
                )


def check_slurm(hydra: DictConfig, named: bool, resume: str) -> None:
    """Raise UserError where a sweep on Slurm could not go on after a preemption.

    named: whether its folder is given.
    """
    if hydra.launcher["_target_"] != f"{SUBMITIT}SlurmLauncher":
        return
    setting = "hydra/launcher=submitit_slurm"
    reason = "A job that is preempted is started again and must find its folder."
    check(resume == "auto", "resume", resume or "''", allowed=f"auto with {setting}", remedy=reason)
    check(
        named,
        "run_dir",
        "''",
        allowed=f"a folder that all machines see with {setting}",
        remedy=reason,
    )
    if shutil.which("sbatch") is None:
        remedy = "Start the sweep on a machine of the cluster"
        raise UserError(f"{setting}: there is no sbatch here. {remedy}")


def is_search(hydra: HydraConf) -> bool:
    """Whether Optuna chooses the jobs."""
    return hydra.sweeper["_target_"] == f"{PLUGIN_PACKAGE}.search.OptunaSweeper"


def has_separate_process(hydra: HydraConf) -> bool:
    """Whether every job has a process to itself; asked in the job: Hydra composes anew for each."""
    launchers = *SUBMITIT_LAUNCHERS, *SUBMITIT_LAUNCHERS.values()
    return hydra.launcher["_target_"] in launchers


def sweep_folder(config: DictConfig) -> Path:
    """The folder of a sweep, made where it is new; with resume=auto the newest sweep of the name.

    config: with Hydra's part. Raises UserError where the sweep cannot be.
    """
    resume = "" if OmegaConf.get_type(config) is EvaluateConfig else config.resume
    if launched_rank() is not None:
        reason = "each process of which would start it. Give ranks=K"
        raise UserError(f"a sweep cannot be started by torchrun, {reason}")
    _check_resume(resume)
    asked = requested_folder(config, "hydra.sweep.dir")
    check_slurm(config.hydra, bool(asked), resume)
    return open_sweep_folder(asked, config.name, resume == "auto")


def open_sweep_folder(sweep_dir: str, name: str, resume: bool) -> Path:
    """Make `sweep_dir`, or runs/`name`/sweep_<time>; to `resume`, the newest of those if any.

    Raises UserError where the folder cannot be made.
    """
    parent = RUNS_FOLDER / name
    if sweep_dir:
        return writable(user_path("run_dir", sweep_dir), "run_dir").path
    sweeps = dated_folders(parent, SWEEP_PREFIX) if resume else []
    return sweeps[0].resolve() if sweeps else make_dated_folder(parent, SWEEP_PREFIX)


def check_job(hydra: HydraConf, settings: TrainConfig) -> None:
    """Raise UserError for what a job of a sweep cannot have."""
    sweep = Path(hydra.sweep.dir)
    _check_resume(settings.resume)
    if settings.run_dir and user_path("run_dir", settings.run_dir).resolve() != sweep.resolve():
        raise UserError(
            f"run_dir={settings.run_dir}: the folders of this sweep are in {sweep}. Give run_dir "
            "one value, or set hydra.sweep.dir and hydra.sweep.subdir"
        )
    if is_search(hydra) and settings.ranks > 1:
        pruner = hydra.sweeper["pruner"]
        remedy = "The processes of a run cannot be ended by what one of them is told."
        allowed = f"none with ranks={settings.ranks}"
        check(pruner == "none", "hydra.sweeper.pruner", pruner, allowed=allowed, remedy=remedy)


def _check_resume(resume: str) -> None:
    allowed = "auto, as the jobs of a sweep cannot share a checkpoint"
    check(resume in ("", "auto"), "resume", resume, allowed=allowed)
