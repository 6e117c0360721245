"""The content of a checkpoint of a run: what it holds beside the learner, and how it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from esper_soa.system.errors import one_line
from esper_soa.training.files.checkpoint import CheckpointError, load_checkpoint, type_error
from esper_soa.training.results.anomalies import WatchState
from esper_soa.training.results.totals import FinalHosts, RunTotals


@dataclass
class SavedTask:
    """The part of a task in a checkpoint."""

    progress: RunTotals
    data: dict[str, str]  # name, source, identity


@dataclass
class SavedRun:
    """The content of a checkpoint of ours."""

    tasks: dict[str, SavedTask]  # by name, in the order in which they are played
    settings: dict
    versions: dict[str, str | None]
    watch: WatchState
    # Percent at the end of the best round: mean over tasks of their means over envs.
    best_accuracy: float
    learner: dict | None

    @property
    def rounds_done(self) -> int:
        """Rounds done, of all tasks."""
        return next(iter(self.tasks.values())).progress.rounds_done

    def task(self, name: str) -> SavedTask:
        """The part of a task; raises CheckpointError where there is none."""
        if name not in self.tasks:
            known = one_line(", ".join(self.tasks))
            raise CheckpointError(f"the checkpoint has no task {one_line(name)}, but {known}")
        return self.tasks[name]


def read_run(path: Path, device: torch.device) -> SavedRun:
    """The run that was saved to `path`; raises CheckpointError for everything else."""
    return parse_run(path, load_checkpoint(path, device))


def parse_run(path: Path, content: Mapping[str, object]) -> SavedRun:
    """The run of a checkpoint's content; raises CheckpointError where it is of none."""
    parts: dict = dict(content)
    fault = type_error(parts, SavedRun, "the record")
    fault = fault or ("" if parts["tasks"] else "the record.tasks is empty")
    if fault:
        reason = f"is not of a training run ({one_line(fault)})"
        raise CheckpointError(f"checkpoint {one_line(path)}: {reason}")
    tasks = {}
    for name, task in parts["tasks"].items():
        recent = [FinalHosts(**hosts) for hosts in task["progress"]["recent"]]
        tasks[name] = SavedTask(RunTotals(**task["progress"] | {"recent": recent}), task["data"])
    return SavedRun(**parts | {"tasks": tasks, "watch": WatchState(**parts["watch"])})
