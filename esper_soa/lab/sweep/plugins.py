"""Hydra's launchers and sweepers on offer: what has to be installed, what they need. No torch."""

import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from hydra.conf import HydraConf
from omegaconf import DictConfig

from esper_soa.config.errors import UserError, check

OURS = "hydra_plugins.esper_soa_sweeps"  # plugins of our own, which Hydra looks for under that name
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
OUR_LAUNCHERS = {
    f"{SUBMITIT}LocalLauncher": f"{OURS}.submitit.LocalJobs",
    f"{SUBMITIT}SlurmLauncher": f"{OURS}.submitit.SlurmJobs",
}
CHOSEN_BY = re.compile(r"(hydra/launcher|hydra/sweeper|\+sweep)=\[?([\w,]+)")
# By what is chosen: the modules that have to be there, and the extra that brings them.
SUBMITTED = (("hydra_plugins.hydra_submitit_launcher", "submitit"), "sweep")
PLUGINS = {
    "joblib": (("hydra_plugins.hydra_joblib_launcher", "joblib"), "sweep"),
    "submitit_local": SUBMITTED,
    "submitit_slurm": SUBMITTED,
    "slurm": SUBMITTED,
    "ray": (("hydra_plugins.hydra_ray_launcher", "ray"), "ray"),
    "optuna": (("optuna",), "sweep"),
    "optuna_search": (("optuna",), "sweep"),
}


def check_plugins(arguments: Sequence[str]) -> None:
    """Raise UserError where the command line chooses a launcher or sweeper not installed."""
    for found in filter(None, map(CHOSEN_BY.match, arguments)):
        for name in found[2].split(","):
            modules, extra = PLUGINS.get(name, ((), ""))
            missing = [module for module in modules if find_spec(module) is None]
            if missing:
                raise UserError(
                    f"{found[1]}={name}: {', '.join(missing)} is not installed. "
                    f"Install the extra: pip install 'esper-soa[{extra}]'"
                )


def take_our_launchers(hydra: DictConfig) -> None:
    """Have submitit's jobs all waited for, however they were asked for; see
    lab/sweep/submitit.py."""
    target = hydra.launcher["_target_"]
    hydra.launcher["_target_"] = OUR_LAUNCHERS.get(target, target)


def check_slurm(hydra: DictConfig, named: bool, resume: str) -> None:
    """Raise UserError where a sweep on Slurm could not go on after a preemption.

    named: whether its folder is given.
    """
    if hydra.launcher["_target_"] != f"{SUBMITIT}SlurmLauncher":
        return
    setting = "hydra/launcher=submitit_slurm"
    why = "A job that is preempted is started again and must find its folder."
    check(resume == "auto", "resume", resume or "''", f"auto with {setting}", why)
    check(named, "run_dir", "''", f"a folder that all machines see with {setting}", why)
    if shutil.which("sbatch") is None:
        raise UserError(
            f"{setting}: there is no sbatch here. Start the sweep on a machine of the cluster"
        )


def is_search(hydra: HydraConf) -> bool:
    """Whether Optuna chooses the jobs."""
    return hydra.sweeper["_target_"] == f"{OURS}.search.OptunaSweeper"


def has_own_process(hydra: HydraConf) -> bool:
    """Whether every job has a process to itself; asked in the job: Hydra composes anew for each."""
    return hydra.launcher["_target_"] in (*OUR_LAUNCHERS, *OUR_LAUNCHERS.values())
