"""Callbacks, called at the start of a run, after every round and at its end; and the recorder of
env-steps. Settings name those of esper_soa.lab, which only they import.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from rich.console import RenderableType
from torch import Tensor

from esper_soa.config.settings import TrainConfig
from esper_soa.env.step import EnvView, StepResult
from esper_soa.env.world import World
from esper_soa.runtime.json_lines import Json
from esper_soa.runtime.ranks import Ranks
from esper_soa.state import Decision
from esper_soa.training.lab import find_in_lab
from esper_soa.training.session import Session

if TYPE_CHECKING:
    from esper_soa.training.final_table import Summary
    from esper_soa.training.task_run import TaskRun

TABLE_LEVELS = ("events", "full")  # of telemetry.level, at which env-steps are recorded


class Facts(NamedTuple):
    """Observation, decision and result of an env-step."""

    observed: EnvView
    decision: Decision
    result: StepResult
    # Float32 [N, X] of all choices in HEADS order; None = not asked or not known.
    probabilities: Tensor | None = None


class Recorder:
    """Records the env-steps of a run. This one records nothing."""

    full = False  # whether `pack` reads the probabilities of all choices
    env_steps = 0  # of all envs, of which every table is on the disk
    received = 0  # env-steps of all envs that were handed over
    table: RenderableType | None = None  # shown below the progress bar

    @property
    def dropped(self) -> int:
        """Env-steps of all envs that some table lacks; known once all is closed."""
        return self.received - self.env_steps

    def truncate(self, rounds: int) -> None:
        """Drop what is recorded after the first `rounds` rounds, which the run repeats; OSError."""

    def begin(self, number: int) -> None:
        """Begin round `number`, from 1."""

    def pack(self, facts: Facts) -> Tensor | None:
        """Numbers of an env-step to copy to the host, float64 [N, C]; None = nothing."""
        return None

    def emit(self, step: int, numbers: np.ndarray) -> None:
        """Take what `pack` returned for env-step `step`, from 1, once on the host; never waits."""

    def end(self) -> None:
        """End the round."""

    def flush(self) -> None:
        """Wait until all complete rounds are on the disk."""

    def close(self) -> None:
        """Write what is left, the round in progress included, and end the thread."""


NO_RECORDER = Recorder()


class Callback:
    """Watches a run: a subclass overrides the methods that it needs. An exception ends the run.

    The run has `cfg` (its settings), `folder` (paths of its files), `world` (hosts and data),
    `player` (the policy) and `totals` (what all rounds so far add up to). A run on several tasks
    makes the calls for each of them, as a run on this task alone would.
    """

    def on_run_start(self, run: "TaskRun") -> None:
        """Before the first round of this process; a resumed run has `totals.rounds_done` > 0."""

    def on_round_end(self, run: "TaskRun", metrics: Mapping[str, Json]) -> None:
        """After a round, once what is due is saved; metrics: its line of metrics.jsonl."""

    def finish(self) -> Mapping[str, int]:
        """After the last round: write what waits. Returns the lines lost, by name, if any."""
        return {}

    def on_run_end(self, run: "TaskRun", summary: "Summary") -> None:
        """After summary.json is written; not for a run that was interrupted."""

    def close(self) -> None:
        """Last of all, also for a run that was interrupted."""


def make_callbacks(cfg: TrainConfig, own: Sequence[Callback] = ()) -> list[Callback]:
    """The callbacks that the settings ask for, and a user's `own`; the report comes last."""
    callbacks = list(own)
    if cfg.track:
        tracking = find_in_lab("track", f"track={cfg.track}", "Take track=[]")
        callbacks.insert(0, cast(Callback, tracking(cfg.track)))
    if cfg.report:
        report = find_in_lab("report", "report=true", "Take report=false")
        callbacks.append(cast(Callback, report()))
    return callbacks


def make_recorder(
    cfg: TrainConfig, world: World, session: Session, ranks: Ranks, control: bool = False
) -> Recorder:
    """The recorder that telemetry.level asks for, of the hosts of `world`, or of the control's; at
    any level where a folder has tables, which a resumed run cuts back.
    """
    level = cfg.telemetry.level
    if level not in TABLE_LEVELS and not session.folder.tables.exists():
        return NO_RECORDER
    other = "telemetry.level=rounds" if level in TABLE_LEVELS else "another run_dir"
    make = find_in_lab("telemetry.level", f"telemetry.level={level}", f"Take {other}")
    return cast(Recorder, make(cfg, world, session, ranks, control))
