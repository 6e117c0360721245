"""Where a sweep goes, and what a sweep and its jobs cannot have. Needs no torch."""

from pathlib import Path

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from esper_soa.config.errors import UserError, check
from esper_soa.config.paths import user_path
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from esper_soa.lab.sweep.plugins import check_slurm, is_search
from esper_soa.training.run_folder import RUNS, dated_folders, make_dated_folder, writable
from esper_soa.training.start import asked_folder, launched_rank

SWEEP = "sweep_"  # before the time in the name of a sweep's folder


def sweep_folder(config: DictConfig) -> Path:
    """The folder of a sweep, made where it is new; with resume=auto the newest sweep of the name.

    config: with Hydra's part. Raises UserError where the sweep cannot be.
    """
    resume = "" if OmegaConf.get_type(config) is EvaluateConfig else config.resume
    _check_sweep(resume)
    asked = asked_folder(config, "hydra.sweep.dir")
    check_slurm(config.hydra, bool(asked), resume)
    return open_sweep_folder(asked, config.name, resume == "auto")


def open_sweep_folder(sweep_dir: str, name: str, resume: bool) -> Path:
    """Make `sweep_dir`, or runs/`name`/sweep_<time>; to `resume`, the newest of those if any.

    Raises UserError where the folder cannot be made.
    """
    parent = RUNS / name
    if sweep_dir:
        return writable(user_path("run_dir", sweep_dir), "run_dir").path
    sweeps = dated_folders(parent, SWEEP) if resume else []
    return sweeps[0].resolve() if sweeps else make_dated_folder(parent, SWEEP)


def check_job(hydra: HydraConf, settings: TrainConfig) -> None:
    """Raise UserError for what a job of a sweep cannot have."""
    sweep = Path(hydra.sweep.dir)
    _check_sweep(settings.resume)
    if settings.run_dir and user_path("run_dir", settings.run_dir).resolve() != sweep.resolve():
        raise UserError(
            f"run_dir={settings.run_dir}: the folders of this sweep are in {sweep}. Give run_dir "
            "one value, or set hydra.sweep.dir and hydra.sweep.subdir"
        )
    if is_search(hydra) and settings.ranks > 1:
        pruner = hydra.sweeper["pruner"]
        remedy = "The processes of a run cannot be ended by what one of them is told."
        allowed = f"none with ranks={settings.ranks}"
        check(pruner == "none", "hydra.sweeper.pruner", pruner, allowed, remedy)


def _check_sweep(resume: str) -> None:
    """Raise UserError for ranks of torchrun, and a checkpoint that all jobs would go on from."""
    if launched_rank() is not None:
        raise UserError(
            "a sweep cannot be started by torchrun, each process of which would start it. Give "
            "ranks=K"
        )
    if resume not in ("", "auto"):
        raise UserError(
            f"resume={resume}: the jobs of a sweep cannot share a checkpoint; take resume=auto"
        )
