"""Callbacks, called at the start of a run, after every round and at its end. Settings name those of
esper_soa.lab, which only they import.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from esper_soa.config.lab import find_in_lab
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.system.json_lines import Json
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import Session
from esper_soa.training.loop.collect import Player
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


class Callback:
    """Watches a run: a subclass overrides the methods that it needs. An exception ends the run.

    A run on several tasks makes the calls for each of them, as a run on this task alone would.
    """

    def on_run_start(self, run: RunView) -> None:
        """Before the first round of this process; a resumed run has `totals.rounds_done` > 0."""

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
    track: list[str], report: bool, user_callbacks: Sequence[Callback] = ()
) -> list[Callback]:
    """The callbacks of the trackers, a user's, and the report, which comes last."""
    callbacks = list(user_callbacks)
    if track:
        tracking = find_in_lab("track", f"track={track}", "Take track=[]")
        callbacks.insert(0, cast(Callback, tracking(track)))
    if report:
        end_report = find_in_lab("report", "report=true", "Take report=false")
        callbacks.append(cast(Callback, end_report()))
    return callbacks
