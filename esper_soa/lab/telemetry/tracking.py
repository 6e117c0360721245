"""Hands the numbers of every round to trackers of others, each by a thread of its own.

One that is slow, fails or cannot be reached costs what it was not given, which is counted: the run
waits for it but some seconds at its end. What each was told stands in trackers.json of the run
folder: a run that goes on is the same run there, and no round is told twice.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from esper_soa.config.errors import UserError
from esper_soa.lab.telemetry.worker import Worker
from esper_soa.runtime.files import LOGGER, Unwritten, write_text
from esper_soa.runtime.json_lines import Json

HOME = "esper_soa.lab.telemetry.trackers"
LIMIT = 64  # rounds that may wait for a tracker
# seconds that a run waits at its end for all trackers together to take what they were given
PATIENCE = 30.0
TOLD = "trackers.json"  # in the run folder
# The numbers of a round, from 1, that a tracker is to be told; of round 0 that there are no more.
Line: TypeAlias = tuple[int, Mapping[str, float]]


class Tracked(NamedTuple):
    """The run that is tracked."""

    folder: Path
    name: str
    settings: Mapping[str, object]  # by dotted names
    id: str = ""  # by which the tracker knows the run; "" = it is to make a new one
    told: int = 0  # the last round that it was told before this process


class Tracker(Protocol):
    """What takes the numbers; all is called in one thread, and may raise what it likes."""

    id: str  # by which it knows the run

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        """The numbers of round `number`, from 1."""

    def finish(self) -> None:
        """All has been said."""


class Told:
    """What trackers know of a run, by their names: its id there, and the last round told."""

    def __init__(self, folder: Path, goes_on: bool, unwritten: Unwritten) -> None:
        """goes_on: whether the run does; one that starts afresh is a new one to them."""
        self._path = folder / TOLD
        self._unwritten = unwritten
        self._lock = threading.Lock()
        self._known = read_told(self._path) if goes_on else {}

    def of(self, name: str) -> tuple[str, int]:
        """The id and the round; "" and 0 where the tracker does not know the run."""
        return self._known.get(name, ("", 0))

    def note(self, name: str, known: tuple[str, int]) -> None:
        """Keep what the tracker `name` knows now."""
        with self._lock, self._unwritten.noting(TOLD):
            self._known[name] = known
            record = {one: {"id": told[0], "round": told[1]} for one, told in self._known.items()}
            write_text(self._path, json.dumps(record, indent=2) + "\n")


def read_told(path: Path) -> dict[str, tuple[str, int]]:
    """The id and the last round by tracker; raises UserError where the file is not ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return {name: (str(one["id"]), int(one["round"])) for name, one in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}). Without it, trackers begin new runs"
        ) from error


class Teller:
    """Opens a tracker with the first line that it has not been told; tells it every such line."""

    def __init__(
        self, name: str, open_: Callable[[Tracked], Tracker], tracked: Tracked, told: Told
    ) -> None:
        self._name = name
        self._open = open_
        self._told = told
        id_, number = told.of(name)
        self._tracked = tracked._replace(id=id_, told=number)
        self._tracker: Tracker | None = None

    def __call__(self, line: Line) -> None:
        """Tell the tracker."""
        number, numbers = line
        if not number:
            if self._tracker is not None:
                self._tracker.finish()
        elif number > self._tracked.told:
            if self._tracker is None:
                self._tracker = self._open(self._tracked)
            self._tracker.log(number, numbers)
            self._told.note(self._name, (self._tracker.id, number))


class Tracking:
    """The trackers of a run."""

    def __init__(
        self, openers: Mapping[str, Callable[[Tracked], Tracker]], tracked: Tracked, told: Told
    ) -> None:
        """openers: what opens each tracker, by its name."""
        self._workers = {
            name: Worker[Line](f"track {name}", Teller(name, open_, tracked, told), LIMIT)
            for name, open_ in openers.items()
        }

    @property
    def dropped(self) -> dict[str, int]:
        """Lines that trackers lack, by their names; without those that lack none."""
        return {name: worker.dropped for name, worker in self._workers.items() if worker.dropped}

    def log(self, line: Mapping[str, Json]) -> None:
        """A line of metrics.jsonl; never waits."""
        for worker in self._workers.values():
            worker.emit((int(str(line["round"])), dict(numbers_of(line))))

    def close(self, seconds: float = PATIENCE) -> None:
        """Tell all trackers to end, wait for them together, no longer, and say what they lack."""
        for worker in self._workers.values():
            worker.insist((0, {}))
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
            raise UserError(
                f"track=[{name}] needs {name}: pip install 'esper-soa[{name}]' ({error})"
            ) from error
    return found
