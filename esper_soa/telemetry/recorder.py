"""Keeps the env-steps of a run as tables in its folder, by a thread that the run never waits for.

Made by the trainer for the rounds of a run; ops/collect.py has an env-step packed on the device and hands over what
arrives on the host an env-step later. A round's files are written when it is over, and now and then before.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.ops.files import Unwritten, write_bytes
from esper_soa.ranks import Ranks
from esper_soa.telemetry.envs_table import EnvsTable
from esper_soa.telemetry.happenings import events_rows
from esper_soa.telemetry.pack import Facts, pack, places
from esper_soa.telemetry.parquet import table_bytes
from esper_soa.telemetry.rows import Legend, Maker, Played, choices_rows, slots_rows, steps_rows, subsets_rows
from esper_soa.telemetry.schema import CURVE_NAMES, SCHEMA_VERSION, STYLE_NAMES
from esper_soa.telemetry.table_files import FOLDER, table_path, written_at
from esper_soa.telemetry.worker import Worker
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES, STAGE_NAMES

LIMIT = 256  # env-steps of all envs that may wait for the thread
SHARE = 20  # a round in progress is written again after this many times as long as the last time took
PATIENCE = 60.0  # seconds that a checkpoint waits for the tables of its rounds
MAKERS: dict[str, Maker] = {
    "steps": steps_rows, "slots": slots_rows, "events": events_rows, "choices": choices_rows, "subsets": subsets_rows,
}  # fmt: skip


class NoRecorder:
    """Records nothing, and asks the device for nothing."""

    full = False
    env_steps = dropped = 0

    def begin(self, number: int) -> None:
        """Round `number`, from 1, begins."""

    def pack(self, facts: Facts) -> Tensor | None:
        """What is to be copied to the host of an env-step, float64 [N, C]; None = nothing."""
        return None

    def emit(self, step: int, numbers: np.ndarray) -> None:
        """Hand over what `pack` gave for env-step `step`, from 1, once it is on the host; never waits."""

    def end(self) -> None:
        """The round is over."""

    def flush(self) -> None:
        """Wait until the rounds that are over are on the disk."""

    def close(self) -> None:
        """Write what is left, the round in progress included, and let the thread go."""


NO_RECORDER = NoRecorder()


class Step(NamedTuple):
    """An env-step on the host."""

    round: int
    step: int
    numbers: np.ndarray  # float64 [N, C]


class End(NamedTuple):
    """A round is over."""

    round: int
    dropped: int  # env-steps of all envs that were lost of it


@dataclass
class Growing:
    """A round of which env-steps are still coming."""

    number: int
    steps: list[Step]
    written: float  # when, on the clock
    cost: float = 0.0  # seconds that it took


class Recorder(NoRecorder):
    """Records the rounds of a run in its folder."""

    def __init__(
        self, folder: Path, legend: Legend, level: str, interval: float, unwritten: Unwritten,
        table: EnvsTable | None = None,
    ) -> None:  # fmt: skip
        """level: events or full; interval: least seconds between two writings of a round in progress; table: shown."""
        self._table = table
        self.full = level == "full"
        self._folder, self._legend, self._interval, self._unwritten = folder, legend, interval, unwritten
        self._tables = written_at(level)
        self._facts = {"schema": str(SCHEMA_VERSION), "legend": json.dumps(legend_record(legend))}
        self._number = self._lost = 0
        self._growing: Growing | None = None
        self._waiting: dict[Path, bytes] = {}  # files of rounds that are over, which the disk has no room for
        self._worker: Worker[Step | End] = Worker("telemetry", self._handle, LIMIT)

    def begin(self, number: int) -> None:
        self._number, self._lost = number, 0

    def pack(self, facts: Facts) -> Tensor | None:
        return pack(facts, self.full)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        if self._table is not None:
            self._table.show(self._number, step, numbers)
        if self._worker.emit(Step(self._number, step, numbers)):
            self.env_steps += len(numbers)
        else:
            self._lost += len(numbers)
            self.dropped += len(numbers)

    def end(self) -> None:
        self._worker.insist(End(self._number, self._lost))

    def flush(self) -> None:
        if not self._worker.flush(PATIENCE):
            self._unwritten.reasons[FOLDER] = self._worker.reason or "the disk is too slow"
        elif self._worker.reason:
            self._unwritten.reasons[FOLDER] = self._worker.reason

    def close(self) -> None:
        self._worker.insist(End(0, 0))
        self.flush()
        self._worker.close(PATIENCE)

    def _handle(self, item: Step | End) -> None:
        """In the thread: keep an env-step, or write a round."""
        now = time.monotonic()
        growing = self._growing
        if isinstance(item, Step):
            if growing is None or growing.number != item.round:
                growing = self._growing = Growing(item.round, [], now)
            growing.steps.append(item)
            if now - growing.written > max(self._interval, SHARE * growing.cost) and self._worker.idle:
                self._make(growing, {"complete": "false"})
                self._write()
                growing.written, growing.cost = time.monotonic(), time.monotonic() - now
            return
        if growing is not None:
            over = item.round == growing.number
            lost = {"dropped": str(item.dropped)} if item.dropped else {}
            self._growing = None
            self._make(growing, {"complete": str(over).lower()} | lost)
        self._write()

    def _make(self, growing: Growing, facts: dict[str, str]) -> None:
        """The files of a round as far as it has come."""
        numbers = np.stack([step.numbers for step in growing.steps])
        where = places(len(self._legend.slots), sum(self._legend.choices), numbers.shape[2])
        played = Played(self._legend, np.array([step.step for step in growing.steps]), numbers, where)
        for table in self._tables:
            rows = MAKERS[table.name](played, growing.number)
            content = table_bytes(table.columns, rows, {"table": table.name} | self._facts | facts)
            self._waiting[table_path(self._folder, table.name, growing.number)] = content

    def _write(self) -> None:
        """Write what waits; what the disk refuses is tried again the next time."""
        with self._unwritten.noting(FOLDER):
            for path in list(self._waiting):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, self._waiting[path])
                del self._waiting[path]


class Relay(NoRecorder):
    """Records what several ranks play: each keeps the env-steps of a round, and the first one records them all."""

    def __init__(self, recorder: NoRecorder, ranks: Ranks, level: str) -> None:
        """recorder: of the first rank; one that records nothing on the others. level: events or full."""
        self.full = level == "full"
        self._recorder, self._ranks = recorder, ranks
        self._steps: list[np.ndarray] = []

    @property
    def env_steps(self) -> int:  # type: ignore[override]
        """That were handed over to be written."""
        return self._recorder.env_steps

    @property
    def dropped(self) -> int:  # type: ignore[override]
        """That were lost."""
        return self._recorder.dropped

    def begin(self, number: int) -> None:
        self._steps = []
        self._recorder.begin(number)

    def pack(self, facts: Facts) -> Tensor | None:
        return pack(facts, self.full)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        self._steps.append(numbers)

    def end(self) -> None:
        played = self._ranks.gather_at_first(torch.from_numpy(np.stack(self._steps, 1)))
        for step, numbers in enumerate([] if played is None else played.unbind(1), start=1):
            self._recorder.emit(step, numbers.numpy())
            if step % (LIMIT // 2) == 0:
                self._recorder.flush()
        self._recorder.end()

    def flush(self) -> None:
        self._recorder.flush()


def legend_record(legend: Legend) -> dict[str, tuple[str, ...]]:
    """The lists by which bits and lists in the tables are to be read."""
    return {
        "ops": OP_NAMES, "slots": legend.slots, "blueprints": legend.blueprints, "styles": STYLE_NAMES,
        "curves": CURVE_NAMES, "stages": STAGE_NAMES, "heads": HEAD_NAMES,
    }  # fmt: skip
