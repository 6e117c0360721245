"""The content of a checkpoint of a run: what it holds beside the learner, and how it is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from esper_soa.system.errors import one_line
from esper_soa.system.value_types import type_error
from esper_soa.training.files.checkpoint import LARGEST_INTEGER, CheckpointError, load_checkpoint
from esper_soa.training.results.anomalies import WatchState
from esper_soa.training.results.final_table import SEED_EVENTS
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
    progress = {} if fault else {name: task["progress"] for name, task in parts["tasks"].items()}
    faults = (_senseless(sums, f"the record.tasks.{name}") for name, sums in progress.items())
    fault = fault or next(filter(None, faults), "")
    if not fault and len({sums["rounds_done"] for sums in progress.values()}) > 1:
        fault = "the record.tasks differ in rounds_done"
    if not fault and math.isnan(parts["best_accuracy"]):
        fault = "the record.best_accuracy is nan"
    if fault:
        reason = f"is not of a training run ({one_line(fault)})"
        raise CheckpointError(f"checkpoint {one_line(path)}: {reason}")
    tasks = {}
    for name, task in parts["tasks"].items():
        recent = [FinalHosts(**hosts) for hosts in task["progress"]["recent"]]
        tasks[name] = SavedTask(RunTotals(**task["progress"] | {"recent": recent}), task["data"])
    return SavedRun(**parts | {"tasks": tasks, "watch": WatchState(**parts["watch"])})


def _senseless(progress: Mapping, place: str) -> str:
    """A value in the sums of a task that no run can have, in words."""
    for name in ("rounds_done", "seconds", "alpha_rows", "cut_off"):
        if not 0 <= progress[name] <= LARGEST_INTEGER:
            return f"{place}.{name} is {progress[name]}"
    for event in SEED_EVENTS if progress["rounds_done"] else ():
        count = progress["seeds"].get(event)
        if count is None or not 0 <= count <= LARGEST_INTEGER:
            return f"{place}.seeds.{event} is {count}"
    for name in ("rewards", "recent"):
        if progress["rounds_done"] and not progress[name]:
            return f"{place}.{name} is empty"
    if any(len(point) != 3 for point in progress["front"]):
        return f"{place}.front has points of other lengths than 3"
    rows = ("accuracies", "parameters", "train_flop", "blueprint", "blend", "alpha")
    for hosts in progress["recent"]:
        if len({len(hosts[name]) for name in rows}) > 1 or not hosts["accuracies"]:
            return f"{place}.recent has lists of different lengths"
        answers = hosts["answers"]
        if answers is not None and [answers.ndim, *answers.shape[:1]] != [2, len(hosts["alpha"])]:
            return f"{place}.recent has answers {list(answers.shape)}"
        if len({len(row) for name in rows[3:] for row in hosts[name]}) > 1:
            return f"{place}.recent has hosts of different numbers of slots"
    return ""
