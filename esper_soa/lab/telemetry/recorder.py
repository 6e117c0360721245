"""Records the env-steps of a run as tables in its folder, in a background thread.

A round's files are written when it is over, and now and then before.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
from torch import Tensor

from esper_soa.config.settings import TelemetryConfig
from esper_soa.env.world import World
from esper_soa.lab.telemetry.console_table import EnvsTable
from esper_soa.lab.telemetry.events import events_rows
from esper_soa.lab.telemetry.pack import ended, is_playing, legend_of, pack, unpack
from esper_soa.lab.telemetry.rows import Legend, choices_rows, slots_rows, steps_rows, subsets_rows
from esper_soa.lab.telemetry.schema import CONTROL_TABLE, FULL_LEVEL_TABLES, SCHEMA_VERSION, TABLES
from esper_soa.lab.telemetry.table_files import (
    TABLES_FOLDER,
    num_rows,
    table_bytes,
    table_files,
    table_path,
)
from esper_soa.lab.telemetry.worker import Worker
from esper_soa.runtime.ranks import Ranks
from esper_soa.system.errors import DataError
from esper_soa.system.files import DELETED_REASON, LOGGER, WriteErrors, write_bytes
from esper_soa.system.plain_files import make_folder, remove
from esper_soa.training.files.session import Session
from esper_soa.training.loop.recorder import NO_RECORDER, TABLE_LEVELS, Facts, Recorder
from esper_soa.vocabulary import CURVE_NAMES, HEAD_NAMES, OP_NAMES, STAGE_NAMES, STYLE_NAMES

MAX_WAITING_STEPS = 256  # env-steps of all envs that may wait for the thread
# a round in progress is written again after this many times as long as the last time took
REWRITE_INTERVAL = 20
PATIENCE_SECONDS = 60.0  # seconds that a checkpoint waits for the tables of its rounds
MAX_QUEUED_BYTES = 2**26  # bytes of finished rounds that wait for room on the disk
TABLE_MAKERS = {
    "steps": steps_rows,
    "slots": slots_rows,
    "events": events_rows,
    "choices": choices_rows,
    "subsets": subsets_rows,
    CONTROL_TABLE: steps_rows,
}

# A round, with an env-step of it and its numbers (float64 [N, C]); or with how many env-steps of
# all envs it lost, where it is over: round 0 where no more will come.
Item: TypeAlias = tuple[int, int, np.ndarray] | tuple[int, int]


class LevelRecorder(Recorder):
    """Packs of an env-step what a level asks for."""

    def __init__(self, level: str) -> None:
        """level: rounds for nothing, events or full."""
        self._level = level
        self.escalate(False)

    def escalate(self, full: bool) -> None:
        self.full = full or self._level == "full"

    def pack(self, facts: Facts) -> Tensor | None:
        return pack(facts, self.full) if self.full or self._level in TABLE_LEVELS else None


class TableFolder(LevelRecorder):
    """The tables of earlier rounds of a run; records nothing."""

    def __init__(self, folder: Path, level: str = "rounds") -> None:
        super().__init__(level)
        self._folder = folder

    def truncate(self, rounds: int) -> None:
        for table in TABLES:
            for number, path in table_files(self._folder, table).items():
                if number > rounds:
                    remove(path)


class TableRecorder(TableFolder):
    """Records the rounds of a run in its folder."""

    def __init__(
        self,
        folder: Path,
        legend: Legend,
        level: str,
        interval: float,
        write_errors: WriteErrors,
        table: EnvsTable | None = None,
        control: bool = False,
    ) -> None:
        """interval: least seconds between two writings of a round in progress; table: shown.
        control: whether it records the control, which has one table.
        """
        super().__init__(folder, level)
        self.table: EnvsTable | None = table
        self._legend = legend
        self._interval = interval
        self._write_errors = write_errors
        growing = [name for name in TABLE_MAKERS if name != CONTROL_TABLE]
        self._tables = [CONTROL_TABLE] if control else growing
        # the lists by which bits and lists in the tables are to be read
        lists = {"ops": OP_NAMES, "slots": legend.slots, "blueprints": legend.blueprints}
        lists |= {"styles": STYLE_NAMES, "curves": CURVE_NAMES, "stages": STAGE_NAMES}
        names = json.dumps(lists | {"heads": HEAD_NAMES})
        self._facts = {"schema": str(SCHEMA_VERSION), "legend": names}
        self._number = self._lost = 0
        # of the thread: the round in progress, its numbers by env-step, and when its files are
        # written again, on the clock
        self._round = 0
        self._steps: dict[int, np.ndarray] = {}
        self._due = 0.0
        # by round: env-steps of all envs, and files that are to be written, or have no room
        self._waiting: dict[int, tuple[int, dict[Path, bytes]]] = {}
        self._on_disk: dict[int, int] = {}  # env-steps of all envs by round
        self._folders = set[Path]()  # of the tables, as far as they have been made
        self._worker: Worker[Item] = Worker("telemetry", self._handle, MAX_WAITING_STEPS)

    def truncate(self, rounds: int) -> None:
        super().truncate(rounds)
        for number, path in table_files(self._folder, "steps").items():
            with suppress(DataError, OSError):  # a damaged file has none
                self._on_disk[number] = num_rows(path)
        self.env_steps = self.received = sum(self._on_disk.values())

    def begin(self, number: int) -> None:
        self._number = number
        self._lost = 0

    def emit(self, step: int, numbers: np.ndarray) -> None:
        if self.table is not None:
            self.table.show(self._number, step, numbers)
        env_steps = int(is_playing(numbers).sum())
        self.received += env_steps
        if not self._worker.emit((self._number, step, numbers)):
            self._lost += env_steps

    def end(self) -> None:
        self._worker.insist((self._number, self._lost))

    def flush(self) -> None:
        done = self._worker.flush(PATIENCE_SECONDS)
        if not done or self._worker.reason:
            reason = self._worker.reason or "the disk is too slow"
            self._write_errors.reasons[TABLES_FOLDER] = reason

    def close(self) -> None:
        self._worker.insist((0, 0))
        self.flush()
        self._worker.close(PATIENCE_SECONDS)
        if self.dropped:
            reasons = self._write_errors.reasons
            reason = reasons.get(TABLES_FOLDER) or "the disk was full, or too slow"
            LOGGER.warning("%s lacks %d env-steps: %s", TABLES_FOLDER, self.dropped, reason)

    def _handle(self, item: Item) -> None:
        """Keep an env-step, or write a round; called in the thread."""
        if len(item) == 2:
            number, dropped = item
            if self._steps:
                facts = {"dropped": str(dropped)} if dropped else {}
                self._make({"complete": str(number == self._round).lower()} | facts)
            self._steps = {}
            self._write()
            return
        now = time.monotonic()
        number, step, numbers = item
        if not self._steps or self._round != number:
            self._round = number
            self._steps = {}
            self._due = now + self._interval
        self._steps[step] = numbers
        if now > self._due and self._worker.idle:
            self._make({"complete": "false"})
            self._write()
            done = time.monotonic()
            self._due = done + max(self._interval, REWRITE_INTERVAL * (done - now))

    def _make(self, facts: dict[str, str]) -> None:
        """The files of the round in progress as far as it has come."""
        numbers = np.stack(list(self._steps.values()))
        record = unpack(self._legend, self._round, np.array(list(self._steps)), numbers=numbers)
        files = {}
        left_out = () if record.full else FULL_LEVEL_TABLES
        for table in (name for name in self._tables if name not in left_out):
            rows = TABLE_MAKERS[table](record)
            content = table_bytes(TABLES[table], rows, {"table": table} | self._facts | facts)
            files[table_path(self._folder, table, self._round)] = content
        self._waiting[self._round] = (int(is_playing(numbers).sum()), files)

    def _write(self) -> None:
        """Write what waits. What the disk refuses is tried again the next time, but for the oldest
        rounds, which are given up where all come to more than MAX_QUEUED_BYTES bytes.
        """
        with self._write_errors.attempt(TABLES_FOLDER):
            for number, (env_steps, files) in list(self._waiting.items()):
                for path in list(files):
                    if path.parent in self._folders and not path.parent.exists():
                        earlier = f"{TABLES_FOLDER} of earlier rounds"
                        self._write_errors.note(earlier, DELETED_REASON)
                    make_folder(path.parent)
                    self._folders.add(path.parent)
                    write_bytes(path, files[path])
                    del files[path]
                self._on_disk[number] = env_steps
                self.env_steps = sum(self._on_disk.values())
                del self._waiting[number]
        sizes = {number: sum(map(len, item[1].values())) for number, item in self._waiting.items()}
        for number in sorted(sizes):
            if sum(sizes.values()) > MAX_QUEUED_BYTES:
                del self._waiting[number], sizes[number]


class RankRecorder(LevelRecorder):
    """Records the envs of several ranks: each keeps a round's env-steps, the first records all."""

    def __init__(self, recorder: Recorder, ranks: Ranks, level: str) -> None:
        """recorder: of the first rank; it records nothing on others."""
        super().__init__(level)
        self._recorder = recorder
        self._ranks = ranks
        self._steps: list[np.ndarray] = []

    def truncate(self, rounds: int) -> None:
        self._recorder.truncate(rounds)

    def begin(self, number: int) -> None:
        self._steps = []
        self._recorder.begin(number)

    def emit(self, step: int, numbers: np.ndarray) -> None:
        self._steps.append(numbers)

    def end(self) -> None:
        # where others play on
        left_out = max(self._ranks.gather_values(len(self._steps))) - len(self._steps)
        steps = [*self._steps, *[ended(numbers) for numbers in self._steps[-1:]] * left_out]
        for step, parts in enumerate(zip(*self._ranks.at_first(steps), strict=True), start=1):
            self._recorder.emit(step, np.concatenate(parts))
            if step % (MAX_WAITING_STEPS // 2) == 0:
                self._recorder.flush()
        self._recorder.end()

    def flush(self) -> None:
        self._recorder.flush()

    def close(self) -> None:
        self._recorder.close()
        self.received = self._recorder.received
        self.env_steps = self._recorder.env_steps


def make_recorder(
    telemetry: TelemetryConfig,
    world: World,
    session: Session,
    ranks: Ranks,
    learns: bool,
    control: bool,
) -> Recorder:
    """The recorder of a run, as telemetry asks.

    world: of the hosts. learns: whether its policy does. control: whether these are the
    control's, which have a table alone.
    """
    folder = session.folder.path
    if telemetry.level not in TABLE_LEVELS and (control or not telemetry.escalation):
        return TableFolder(folder)
    level = "events" if control else telemetry.level
    recorder = NO_RECORDER
    if ranks.first:
        legend = legend_of(world, learns and not control)
        shown = telemetry.console == "envs" and not control
        table = EnvsTable(legend) if shown else None
        recorder = TableRecorder(
            folder,
            legend,
            level,
            interval=telemetry.write_interval,
            write_errors=session.write_errors,
            table=table,
            control=control,
        )
    return RankRecorder(recorder, ranks, level) if ranks.count > 1 else recorder
