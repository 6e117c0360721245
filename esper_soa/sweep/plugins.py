"""Hydra's launchers and sweepers that the configuration files offer: what has to be installed for
them, and what else they need. Needs no torch.
"""

import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from hydra.conf import HydraConf
from omegaconf import DictConfig

from esper_soa.errors import UserError, check

OURS = "hydra_plugins.esper_soa_sweeps"  # plugins of our own, which Hydra looks for under that name


SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
OUR_LAUNCHERS = {
    f"{SUBMITIT}LocalLauncher": f"{OURS}.submitit.LocalJobs",
    f"{SUBMITIT}SlurmLauncher": f"{OURS}.submitit.SlurmJobs",
}
CHOSEN_BY = re.compile(r"(hydra/launcher|hydra/sweeper|\+sweep)=\[?([\w,]+)")


class Plugin(NamedTuple):
    """What has to be there for a launcher or a sweeper."""

    modules: tuple[str, ...]
    extra: str  # that brings them


JOBLIB = Plugin(("hydra_plugins.hydra_joblib_launcher", "joblib"), "sweep")
SUBMITTED = Plugin(("hydra_plugins.hydra_submitit_launcher", "submitit"), "sweep")
RAY = Plugin(("hydra_plugins.hydra_ray_launcher", "ray"), "ray")
OPTUNA = Plugin(("optuna",), "sweep")
PLUGINS = {
    "joblib": JOBLIB,
    "submitit_local": SUBMITTED,
    "submitit_slurm": SUBMITTED,
    "slurm": SUBMITTED,
    "ray": RAY,
    "optuna": OPTUNA,
    "optuna_search": OPTUNA,
}


def check_plugins(arguments: Sequence[str]) -> None:
    """Raise UserError where the command line chooses a launcher or a sweeper that is not
    installed.
    """
    for found in filter(None, map(CHOSEN_BY.match, arguments)):
        for name in found[2].split(","):
            plugin = PLUGINS.get(name)
            missing = (
                [module for module in plugin.modules if not _is_there(module)] if plugin else []
            )
            if plugin and missing:
                raise UserError(
                    f"{found[1]}={name}: {', '.join(missing)} is not installed. "
                    f"Install the extra: pip install 'esper-soa[{plugin.extra}]'"
                )


def _is_there(module: str) -> bool:
    """Whether a module can be imported; nothing but the packages that hold it is."""
    parent = module.rpartition(".")[0]
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None


def take_our_launchers(hydra: DictConfig) -> None:
    """Have submitit's jobs all waited for, however they were asked for; see sweep/submitit.py."""
    target = hydra.launcher["_target_"]
    hydra.launcher["_target_"] = OUR_LAUNCHERS.get(target, target)


def check_slurm(hydra: DictConfig, named: bool, resume: str) -> None:
    """Raise UserError where a sweep on Slurm could not go on after a preemption.

    named: whether its folder is given.
    """
    if not is_slurm(hydra):
        return
    setting = "hydra/launcher=submitit_slurm"
    why = "A job that is preempted is started again and must find its folder."
    check(resume == "auto", "resume", resume or "''", f"auto with {setting}", why)
    check(named, "run_dir", "''", f"a folder that all machines see with {setting}", why)
    if shutil.which("sbatch") is None:
        raise UserError(
            f"{setting}: there is no sbatch here. Start the sweep on a machine of the cluster"
        )


def is_slurm(hydra: DictConfig) -> bool:
    """Whether Slurm starts the jobs."""
    return hydra.launcher["_target_"] in OUR_LAUNCHERS and "Slurm" in hydra.launcher["_target_"]


def is_search(hydra: HydraConf) -> bool:
    """Whether Optuna chooses the jobs."""
    return hydra.sweeper["_target_"] == f"{OURS}.search.OptunaSweeper"


def plays_in_own_process(hydra: HydraConf) -> bool:
    """Whether the launcher gives every job a process to itself; asked in the job, for which Hydra
    composes anew.
    """
    return hydra.launcher["_target_"] in (*OUR_LAUNCHERS, *OUR_LAUNCHERS.values())
