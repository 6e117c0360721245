"""Where a run takes place and begins. Needs no torch.

A run begins in two steps, whoever asks for it: `make_run_folder` chooses its folder, and once the
folder is claimed by a session, `begin_run` finds where to go on, or writes the settings.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from esper_soa.config.agent import SCRATCH
from esper_soa.config.paths import user_path
from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.system.errors import UserError, one_line
from esper_soa.training.files import run_folder
from esper_soa.training.files.find_policy import find_policy
from esper_soa.training.files.session import Session


class RunStart(NamedTuple):
    """A folder, and the checkpoint in it to go on from; None for a new run."""

    folder: run_folder.RunFolder
    checkpoint: Path | None


class LaunchedRank(NamedTuple):
    """A process among those that torch's elastic launcher has started together."""

    rank: int  # the first, 0, is the one that writes
    processes: int
    local_rank: int  # on its machine
    local_processes: int
    restarts: int  # times that all were started again
    run_id: str


def launched_rank() -> LaunchedRank | None:
    """The rank of this process by its environment; None for one that no launcher has started."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    return LaunchedRank(
        rank=int(environment["RANK"]),
        processes=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_processes=int(environment["LOCAL_WORLD_SIZE"]),
        restarts=int(environment["TORCHELASTIC_RESTART_COUNT"]),
        run_id=environment["TORCHELASTIC_RUN_ID"],
    )


def requested_folder(config: DictConfig, key: str) -> str:
    """The folder that run_dir asks for, or Hydra's `key` where that is set; empty for neither."""
    folder = str(OmegaConf.select(config, key))
    if config.run_dir and folder != config.run_dir:
        both = f"run_dir={config.run_dir}, {key}={folder}"
        raise UserError(f"{both}: both name the folder. Give one of them")
    return folder


def make_run_folder(settings: TrainConfig, run_dir: str) -> run_folder.RunFolder:
    """The folder of a run, made where new: `run_dir`, or its name and the time; or what it resumes.

    Where torchrun has started the ranks of the run, the id of its launch stands for the time.
    Raises UserError where there can be none, or a policy to start from leads nowhere.
    """
    if settings.resume:
        return resume_start(settings.resume, run_dir, settings.name).folder
    if settings.policy.name == "ppo" and settings.policy.init != SCRATCH:
        find_policy(settings.policy.init)
    launched = launched_rank()
    if launched is None:
        return run_folder.open_run_folder(run_dir, settings.name)
    # torchrun tells only the machine of a rank that was lost that it starts all again, so a folder
    # that there is, is that of this run, for all ranks, on every machine, and at every start
    launch_folder = run_folder.RUNS_FOLDER / settings.name / launched.run_id
    return run_folder.writable(
        user_path("run_dir", run_dir) if run_dir else launch_folder, "run_dir"
    )


def begin_run(session: Session, settings: TrainConfig, overrides: Sequence[str]) -> Path | None:
    """The checkpoint to go on from in the session's folder, the newest where ranks were started
    again; None for a new run, whose config.yaml and overrides.txt are written. A resumed run writes
    its own once the checkpoint is found to fit.
    """
    folder = session.folder
    launched = launched_rank()
    restarted = launched is not None and (launched.restarts or not settings.resume)
    resume = "auto" if restarted else settings.resume
    checkpoint = None
    if resume:
        checkpoint = resume_start(resume, str(folder.path), settings.name).checkpoint
    else:
        run_folder.open_run_folder(str(folder.path), settings.name)
    if checkpoint is None:
        with session.write_errors.attempt(folder.config.name):
            run_folder.write_config(folder, settings_yaml(settings), list(overrides))
    return checkpoint


def resume_start(resume: str, run_dir: str, name: str) -> RunStart:
    """Where to go on: `resume` is a checkpoint, a run folder, or auto.

    auto takes the newest checkpoint in `run_dir`, or without one in the newest folder of
    runs/`name` that has any; where there is none it starts afresh. A damaged checkpoint is passed
    over (see `damaged_newer`). Raises UserError where there is nothing to resume from.
    """
    requested = user_path("run_dir", run_dir).resolve()
    if resume != "auto":
        path = run_folder.find_checkpoint(resume, "resume")
        if run_dir and requested != path.parent:
            problem = f"a resumed run goes on in the folder of its checkpoint, {path.parent}"
            raise UserError(f"run_dir={one_line(run_dir)}: {problem}. Leave run_dir out.")
        return RunStart(run_folder.writable(path.parent, "resume"), path)
    for folder in (
        [requested] if run_dir else run_folder.dated_folders(run_folder.RUNS_FOLDER / name)
    ):
        checkpoints = run_folder.RunFolder(folder.resolve()).checkpoints()
        if checkpoints:
            claimed = run_folder.writable(folder, "run_dir")
            return RunStart(claimed, run_folder.newest_undamaged(checkpoints, "resume=auto"))
    ended = any((requested / result).exists() for result in ("summary.json", "evaluation.json"))
    if run_dir and not ended:  # left by a run that ended before its first checkpoint
        return RunStart(run_folder.writable(requested, "run_dir"), None)
    return RunStart(run_folder.open_run_folder(run_dir, name), None)
