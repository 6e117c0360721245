"""Sends the numbers of every round to trackers such as TensorBoard, each by a thread of its own.

A tracker that is slow, fails or cannot be reached loses lines, which are counted: the run waits for
it for some seconds at its end. The file trackers.json of the run folder holds what each tracker
has: a run that is resumed is the same run there, and no round is sent twice.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from esper_soa.config.settings import flat_settings
from esper_soa.lab.telemetry.worker import Worker
from esper_soa.system.errors import UserError, reading
from esper_soa.system.files import LOGGER, WriteErrors, write_text
from esper_soa.system.json_lines import Json
from esper_soa.system.plain_files import read_text
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.callbacks import Callback, RunView

TRACKERS_PACKAGE = "esper_soa.lab.telemetry.trackers"
MAX_WAITING_ROUNDS = 64  # rounds that may wait for a tracker
# seconds that a run waits at its end for all trackers together
PATIENCE_SECONDS = 30.0
# The number of a round, from 1, and its numbers; round 0 ends the run.
Line: TypeAlias = tuple[int, Mapping[str, float]]


class TrackedRun(NamedTuple):
    folder: Path
    name: str
    settings: Mapping[str, object]  # by dotted names
    id: str = ""  # of the run at the tracker; "" = make a new one
    last_round: int = 0  # that it received before this process


class Tracker(Protocol):
    """Takes the numbers; all is called in one thread, and may raise any exception."""

    id: str  # of the run at the tracker

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        """The numbers of round `number`, from 1."""

    def finish(self) -> None:
        """End the tracker's run."""


Opener: TypeAlias = Callable[[TrackedRun], Tracker]


class TrackerState:
    """The id of a run at each tracker, by the tracker's name, and the last round it received."""

    def __init__(self, folder: Path, resumed: bool, write_errors: WriteErrors) -> None:
        """resumed: whether the run is; one that starts afresh is a new one to all trackers."""
        self._path = RunFolder(folder).trackers
        self._write_errors = write_errors
        self._lock = threading.Lock()
        self.known = read_state(self._path) if resumed else {}

    def save(self, name: str, known: tuple[str, int]) -> None:
        """Save what the tracker `name` knows now."""
        with self._lock, self._write_errors.attempt(self._path.name):
            self.known[name] = known
            record = {name: {"id": id_, "round": last} for name, (id_, last) in self.known.items()}
            write_text(self._path, json.dumps(record, indent=2) + "\n")


def read_state(path: Path) -> dict[str, tuple[str, int]]:
    """The id and the last round by tracker; raises UserError where the file is not ours."""
    with reading(path, UserError, "of trackers, which begin new runs without it"):
        state = json.loads(read_text(path)) if path.exists() else {}
        return {name: (str(entry["id"]), int(entry["round"])) for name, entry in state.items()}


def make_sender(
    name: str, open_: Opener, tracked: TrackedRun, state: TrackerState
) -> Callable[[Line], None]:
    """Opens a tracker with the first line that it lacks; sends it every such line."""
    id_, last_round = state.known.get(name, ("", 0))
    tracker: Tracker | None = None

    def send(line: Line) -> None:
        nonlocal tracker
        number, numbers = line
        if not number and tracker is not None:
            tracker.finish()
        elif number > last_round:
            if tracker is None:
                tracker = open_(tracked._replace(id=id_, last_round=last_round))
            tracker.log(number, numbers)
            state.save(name, (tracker.id, number))

    return send


class Tracking(Callback):
    """The trackers of a run."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: of trackers; raises UserError where one is not installed."""
        self.openers = find_openers(names)
        self._workers: dict[str, Worker[Line]] = {}

    def on_run_start(self, run: RunView) -> None:
        tracked = TrackedRun(run.folder.path, run.cfg.name, flat_settings(asdict(run.cfg)))
        resumed = run.totals.rounds_done > 0
        state = TrackerState(run.folder.path, resumed, run.session.write_errors)
        self.start(tracked, state)
        # Rounds that a process which was killed had not sent; those that were are passed over.
        behind = resumed and self._workers and run.folder.metrics.exists()
        lines = read_text(run.folder.metrics).splitlines() if behind else []
        sent = min((state.known.get(name, ("", 0))[1] for name in self._workers), default=0)
        for line in lines[sent:]:
            metrics = json.loads(line)
            for worker in self._workers.values():
                worker.insist((metrics["round"], dict(numbers_of(metrics))))

    def start(self, tracked: TrackedRun, state: TrackerState) -> None:
        """Give each tracker a thread."""
        for name, open_ in self.openers.items():
            send = make_sender(name, open_, tracked, state=state)
            self._workers[name] = Worker[Line](f"track {name}", send, MAX_WAITING_ROUNDS)

    def on_round_end(self, run: RunView | None, metrics: Mapping[str, Json]) -> None:
        for worker in self._workers.values():
            worker.emit((int(str(metrics["round"])), dict(numbers_of(metrics))))

    def finish(self) -> dict[str, int]:
        """End all trackers and wait for them, for PATIENCE at most; returns the lines they lack."""
        workers = self._workers
        self._workers = {}
        for worker in workers.values():
            worker.insist((0, {}))
        for worker in workers.values():
            worker.close(PATIENCE_SECONDS / len(workers))
        dropped = {name: worker.dropped for name, worker in workers.items() if worker.dropped}
        for name, count in dropped.items():
            reason = workers[name].reason or "it is too slow"
            LOGGER.warning("track    %s lacks %d lines: %s", name, count, reason)
        return dropped

    def close(self) -> None:
        self.finish()


def numbers_of(value: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers in a record, by names with slashes."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from numbers_of(item, f"{prefix}{name}/")
        elif isinstance(item, int | float) and isfinite(item):
            yield f"{prefix}{name}", float(item)


def find_openers(names: Sequence[str]) -> dict[str, Opener]:
    """Openers of the trackers of these names; raises UserError where one is not installed."""
    openers = {}
    for name in names:
        try:
            openers[name] = import_module(f"{TRACKERS_PACKAGE}.{name}").open_tracker
        except ImportError as error:
            remedy = f"pip install 'esper-soa[{name}]'"
            raise UserError(f"track=[{name}] needs {name}: {remedy} ({error})") from error
    return openers
