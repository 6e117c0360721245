"""Callbacks, called at the start of a run, after every env-step and round, and at its end. Settings
name those of esper_soa.lab, which only they import.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from esper_soa.config.lab import find_in_lab
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.state import EnvState
from esper_soa.system.json_lines import Json
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import Session
from esper_soa.training.loop.collect import Player
from esper_soa.training.loop.recorder import Recorder
from esper_soa.training.results.final_table import Summary
from esper_soa.training.results.totals import RunTotals


class RunView(Protocol):
    """The view of a task of a run that callbacks have."""

    cfg: TrainConfig  # its settings
    world: World  # hosts and data
    player: Player  # the policy
    totals: RunTotals  # sums over all rounds so far
    folder: RunFolder  # paths of its files
    session: Session  # console, log, and what could not be written


class EnvStep(NamedTuple):
    """An env-step of the N hosts of a run."""

    round: int  # from 1, as in metrics.jsonl
    step: int  # from 1
    # Float64 [N] on the host, by name: accuracy, val_loss, train_loss, train_accuracy, reward,
    # success, effective_op, panic, over (the episode had ended before), and the choices by head;
    # units are those of the table `steps` of docs/telemetry.md, choices are codes.
    numbers: Mapping[str, np.ndarray]
    state: EnvState | None  # after the actions, where `Callback.live` asks for it


class Callback:
    """Watches a run: a subclass overrides the methods that it needs. An exception ends the run.

    A run on several tasks makes the calls for each of them, as a run on this task alone would.
    """

    def on_run_start(self, run: RunView) -> None:
        """Before the first round of this process; a resumed run has `totals.rounds_done` > 0."""

    live = False  # whether `on_env_step` is given the state on the device, see there

    def on_env_step(self, run: RunView, env_step: EnvStep) -> None:
        """After an env-step, controls left out; no part of what CUDA graphs hold.

        Its numbers come once they are on the host, an env-step later at the earliest: nobody waits
        for them. With `live = True` the call comes at once, with the state, and `run.world.weights`
        are those of now: the host waits for the device at every env-step, which on a GPU may cost
        more than the env-step. Keep clones alone, as tensors are overwritten.
        """

    def watch(self, run: RunView, recorder: Recorder) -> Recorder:
        """The recorder of a round that begins, controls left out: `recorder`, or one that passes
        all on to it.
        """
        return recorder

    def on_round_end(self, run: RunView, metrics: Mapping[str, Json]) -> None:
        """After a round, once what is due is saved; metrics: its line of metrics.jsonl."""

    def finish(self) -> Mapping[str, int]:
        """After the last round: write what waits. Returns the lines lost, by name, if any."""
        return {}

    def on_run_end(self, run: RunView, summary: Summary) -> None:
        """After summary.json is written; not for a run that was interrupted."""

    def close(self) -> None:
        """Last of all, also for a run that was interrupted."""


def make_callbacks(
    track: list[str], report: bool, user_callbacks: Sequence[Callback] = (), ops: Sequence[str] = ()
) -> list[Callback]:
    """The callbacks of the trackers, a user's, that of the effects of the actions `ops`, and the
    report, which comes last.
    """
    callbacks = list(user_callbacks)
    if ops:
        asked = f"effects.ops=[{','.join(ops)}]"
        callbacks.append(cast(Callback, find_in_lab("effects.ops", asked, "Take effects.ops=[]")()))
    if track:
        tracking = find_in_lab("track", f"track={track}", "Take track=[]")
        callbacks.insert(0, cast(Callback, tracking(track)))
    if report:
        end_report = find_in_lab("report", "report=true", "Take report=false")
        callbacks.append(cast(Callback, end_report()))
    return callbacks
