"""Hands the numbers of every round to trackers of others, each by a thread of its own.

Opened by the trainer for `track`. A tracker that is slow, fails or cannot be reached costs what it was not given, which
is counted, and nothing else: the run never waits for it but for some seconds at its end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol

from esper_soa.errors import UserError
from esper_soa.ops.files import LOGGER
from esper_soa.ops.json_lines import Json
from esper_soa.telemetry.worker import Worker

HOME = "esper_soa.telemetry.trackers"
LIMIT = 64  # rounds that may wait for a tracker
PATIENCE = 30.0  # seconds that a run waits at its end for all trackers together to take what they were given


class Tracked(NamedTuple):
    """The run that is tracked."""

    folder: Path
    name: str
    settings: Mapping[str, object]  # by dotted names
    rounds_done: int  # before this process


class Tracker(Protocol):
    """What takes the numbers; all is called in one thread, and may raise what it likes."""

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        """The numbers of round `number`, from 1."""
        ...

    def finish(self) -> None:
        """All has been said."""
        ...


class Line(NamedTuple):
    """What a tracker is to be told: the numbers of a round; of round 0 that there are no more."""

    number: int
    numbers: Mapping[str, float]


class Teller:
    """Opens a tracker with the first line and tells it every line, in the thread of a worker."""

    def __init__(self, open_: Callable[[Tracked], Tracker], tracked: Tracked) -> None:
        self._open, self._tracked = open_, tracked
        self._tracker: Tracker | None = None

    def __call__(self, line: Line) -> None:
        """Tell the tracker."""
        if line.number and self._tracker is None:
            self._tracker = self._open(self._tracked)
        if self._tracker is None:
            return
        if line.number:
            self._tracker.log(*line)
        else:
            self._tracker.finish()


class Tracking:
    """The trackers of a run."""

    def __init__(self, openers: Mapping[str, Callable[[Tracked], Tracker]], tracked: Tracked) -> None:
        """openers: what opens each tracker, by its name."""
        self._workers = {
            name: Worker[Line](f"track {name}", Teller(open_, tracked), LIMIT) for name, open_ in openers.items()
        }

    @property
    def dropped(self) -> dict[str, int]:
        """Lines that trackers lack, by their names; without those that lack none."""
        return {name: worker.dropped for name, worker in self._workers.items() if worker.dropped}

    def log(self, line: Mapping[str, Json]) -> None:
        """A line of metrics.jsonl; never waits."""
        if self._workers:
            numbers, number = dict(numbers_of(line)), line["round"]
            for worker in self._workers.values():
                worker.emit(Line(int(str(number)), numbers))

    def close(self, seconds: float = PATIENCE) -> None:
        """Tell all trackers that this is all, wait for them together, but not longer, and say what they lack."""
        for worker in self._workers.values():
            worker.insist(Line(0, {}))
        for worker in self._workers.values():
            worker.close(seconds / len(self._workers))
        for name, count in self.dropped.items():
            reason = self._workers[name].reason or "it is too slow"
            LOGGER.warning("track    %s lacks %d lines: %s", name, count, reason)


def numbers_of(value: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers in a record, by names with slashes."""
    for name, one in value.items():
        if isinstance(one, Mapping):
            yield from numbers_of(one, f"{prefix}{name}/")
        elif isinstance(one, int | float) and isfinite(one):
            yield f"{prefix}{name}", float(one)


def openers(names: Sequence[str]) -> dict[str, Callable[[Tracked], Tracker]]:
    """What opens the trackers of these names; raises UserError where one is not installed."""
    found = {}
    for name in names:
        try:
            found[name] = import_module(f"{HOME}.{name}").open_tracker
        except ImportError as error:
            raise UserError(str(error)) from error
    return found
