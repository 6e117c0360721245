"""Reads run folders of finished, killed or active runs.

What is not there yet is no error: a report is of what has been written. What cannot be read is left
out, and said in a line of the log. Needs no torch.
"""

import io
import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from esper_soa.lab.run_folders import find_run_folders, read_settings
from esper_soa.lab.telemetry.table_files import TABLES_FOLDER, read_columns, table_files
from esper_soa.system.errors import DataError, check_data, one_line, reading
from esper_soa.system.files import LOGGER
from esper_soa.system.plain_files import open_plain
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.answers import GROWN, read_answers
from esper_soa.training.results.statistics import paired_answers

Record = dict[str, object]
Cell: TypeAlias = None | int | float | str
Row: TypeAlias = dict[str, Cell]
Table: TypeAlias = dict[str, list[Cell]]  # columns of one length
Columns: TypeAlias = dict[str, np.ndarray]  # of one length, as table_files.read_columns has them
EPISODE_FIELDS = ("round", "shapley")  # that a report shows
MAX_JSON_DEPTH = 32  # records and lists within each other; those of a run are 5 deep
MAX_BYTES = 1 << 20  # the size of a file of one record, and of a line
MAX_SUMMARY_BYTES = 1 << 22  # that of 4096 hosts
# Memory (bytes) of the records of a file: of one record, of metrics.jsonl (those of 6,000 rounds)
# and of episodes.jsonl. A nested record takes 32 times as much as its text.
MAX_RECORD_MEMORY = 1 << 25
MAX_MEMORY = 3 << 25
MAX_EPISODE_MEMORY = 1 << 25
MAX_NAMES = 1 << 14  # of all values in a file
ROWS_AT_ONCE = 4096  # rows that are made of columns at a time


@dataclass(frozen=True)
class RunRecord:
    """A run by its files."""

    path: Path
    label: str  # that no other run of the report has
    settings: dict[str, object] = field(default_factory=dict)  # by dotted name
    overrides: list[str] = field(default_factory=list)
    versions: Record = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)  # lines of metrics.jsonl
    # lines of episodes.jsonl, with EPISODE_FIELDS
    episodes: list[Record] = field(default_factory=list)
    summary: Record = field(default_factory=dict)  # empty where the run has not come to its end
    group: str = ""  # the label of its group, see groups.py
    # Percent that its hosts have right of each test sample, by `grown` and names of controls.
    samples: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def planned(self) -> int:
        """Rounds that the settings ask for; 0 where they cannot be read."""
        return int(number(self.settings, "rounds") or 0)

    @property
    def finished(self) -> bool:
        """Whether the run has written its final table."""
        return bool(self.summary)

    @property
    def accuracy(self) -> float | None:
        """Test accuracy at the end, percent, mean over the grown hosts; None before the end."""
        return number(self.summary, "grown", "test_accuracy")

    @property
    def controls(self) -> list[Record]:
        """Records of the controls in summary.json, which had one with its difference beside it."""
        controls = self.summary.get("controls")
        if isinstance(controls, list):
            return [part({"": control}, "") for control in controls]
        control = part(self.summary, "control")
        beside = {key: self.summary.get(key) for key in ("difference", "verdict")}
        return [control | beside] if control else []

    @property
    def control(self) -> Record:
        """The first control; empty where there is none."""
        return next(iter(self.controls), {})

    @property
    def gain(self) -> float | None:
        """Percent points over the first control at the end; None where there is none."""
        return number(self.control, "difference", "test_accuracy", "mean")

    @property
    def gain_by_sample(self) -> np.ndarray | None:
        """The gain on each test sample, percent points; None where it is not known."""
        control = self.samples.get(str(self.control.get("name")))
        return paired_answers(self.samples.get(GROWN), control)

    @property
    def slots(self) -> list[str]:
        """Names of the host's slots."""
        slots = self.settings.get("slots")
        return [str(name) for name in slots] if isinstance(slots, list) else []


def number(record: object, *names: str) -> float | None:
    """The finite number under `names`, one within the other; None where there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(record, bool) or not isinstance(record, int | float):
        return None
    return float(record) if abs(record) <= sys.float_info.max else None


def part(record: object, name: str) -> Record:
    """The record under `name`; empty where there is none."""
    item = record.get(name) if isinstance(record, Mapping) else None
    return {str(key): value for key, value in item.items()} if isinstance(item, Mapping) else {}


def numbers(record: object, name: str) -> list[float | None]:
    """The list of numbers under `name`; empty where there is none."""
    items = record.get(name) if isinstance(record, Mapping) else None
    return [number({"": value}, "") for value in items] if isinstance(items, list) else []


def listed(record: object, name: str) -> list:
    """The list under `name`; empty where there is none."""
    items = record.get(name) if isinstance(record, Mapping) else None
    return items if isinstance(items, list) else []


def round_of(line: Record) -> int:
    """The round, from 1, that a line of JSON is of."""
    return int(number(line, "round") or 0)


def mean_of(values: Sequence[object]) -> float | None:
    """The mean of those that are numbers; None where there are none."""
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def find_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """The runs in folders that are of a run, or hold some; UserError where one holds none."""
    return [read_run(path, label) for label, path in find_run_folders(folders).items()]


def read_run(path: Path, label: str = "") -> RunRecord:
    """The run in the folder `path`, as far as it is recorded."""
    folder = RunFolder(path)
    # first, as what is read of them takes much more memory than what stays
    samples = read_samples(folder.answers)
    return RunRecord(
        path,
        label or path.name,
        read_settings(folder.config),
        overrides=read_text(folder.overrides).splitlines(),
        versions=read_json(folder.versions),
        rounds=read_lines(folder.metrics, MAX_MEMORY),
        episodes=read_lines(folder.episodes, MAX_EPISODE_MEMORY, fields=EPISODE_FIELDS),
        summary=read_json(folder.summary, MAX_SUMMARY_BYTES),
        samples=samples,
    )


def read_samples(path: Path) -> dict[str, np.ndarray]:
    """`RunRecord.samples` of a file of answers; empty where there is none."""
    with _left_out(path):
        answers = read_answers(path)
        means = {name: answers.means(name) for name in answers.right}
        return {name: mean for name, mean in means.items() if mean is not None}
    return {}


def read_lines(path: Path, most: int, fields: Sequence[str] = ()) -> list[Record]:
    """The records in a file of JSON lines, with these fields alone where some are given; the last
    ones, where they take more memory (bytes) than `most`. Lines that cannot be read are counted in
    the log.
    """
    records = deque[tuple[Record, int]]()
    names: dict[str, str] = {}
    memory = dropped = 0
    faults: list[str] = []
    with _left_out(path), _opened(path) as file:
        while line := file.readline(MAX_BYTES):
            try:
                record, size = _parsed(line, path, names, fields=fields)
            except DataError as error:
                faults.append(str(error) if not faults else "")
                continue
            records.append((record, size))
            memory += size
            while memory > most:
                memory -= records.popleft()[1]
                dropped += 1
    if faults:
        LOGGER.warning("report   without %d lines: %s", len(faults), faults[0])
    if dropped:
        LOGGER.warning("report   without the first %d lines of %s", dropped, one_line(path))
    return [record for record, _ in records if record]


def read_text(path: Path) -> str:
    """The text of a file; empty where there is none."""
    with _left_out(path):
        return _content(path, MAX_BYTES).decode(errors="replace")
    return ""


def read_json(path: Path, most: int = MAX_BYTES) -> Record:
    """The record in a JSON file of at most so many bytes; empty where there is none."""
    with _left_out(path):
        return _parsed(_content(path, most) or b"{}", path, {})[0]
    return {}


def _content(path: Path, most: int) -> bytes:
    """The content of a file; empty where there is none. DataError for more bytes than `most`."""
    with _opened(path) as file:
        content = file.read(most + 1)
    check_data(len(content) <= most, one_line(path), f"have at most {most:,} bytes")
    return content


def _opened(path: Path) -> BinaryIO:
    """The file, opened; without content where there is none. Raises OSError."""
    try:
        return os.fdopen(open_plain(path), "rb")
    except FileNotFoundError:
        return io.BytesIO()


@contextmanager
def _left_out(path: Path) -> Iterator[None]:
    """Say in a line of the log what cannot be read within."""
    try:
        with reading(path, DataError, "a file of a run"):
            yield
    except DataError as error:
        LOGGER.warning("report   without a file: %s", error)


def _parsed(
    content: bytes, path: Path, names: dict[str, str], fields: Sequence[str] = ()
) -> tuple[Record, int]:
    """The record that `content`, out of the file `path`, holds as JSON, with these fields alone
    where some are given, and its memory; DataError for no JSON, or for too much.

    names: those of the file so far, each of which is in memory once.
    """
    with reading(path, DataError, "JSON"):
        record = json.loads(
            content.decode(errors="replace"), object_pairs_hook=partial(_record, names)
        )
        if not isinstance(record, dict):
            return {}, 0
        record = {name: record[name] for name in fields or record if name in record}
        size = _memory_of(record)
        if size > MAX_RECORD_MEMORY:
            raise ValueError(f"of {MAX_RECORD_MEMORY:,} bytes of memory at most, not {size:,}")
    return record, size


def _record(names: dict[str, str], pairs: Sequence[tuple[str, object]]) -> Record:
    """The record of the pairs; ValueError where a file has more names than MAX_NAMES."""
    record = {names.setdefault(name, name): value for name, value in pairs}
    if len(names) > MAX_NAMES:
        raise ValueError(f"more than {MAX_NAMES:,} names")
    return record


def _memory_of(values: Record | list, levels: int = MAX_JSON_DEPTH) -> int:
    """Memory (bytes) of the values with all that they hold but names; ValueError where they are
    deeper than `levels`.
    """
    if levels <= 0:
        raise ValueError(f"more than {MAX_JSON_DEPTH} deep")
    size = sys.getsizeof(values)
    for inner in values.values() if isinstance(values, dict) else values:
        if isinstance(inner, dict | list):
            size += _memory_of(inner, levels - 1)
        else:
            size += sys.getsizeof(inner)
    return size


def read_round(run: Path, table: str, number: int, names: Sequence[str]) -> Columns:
    """Columns of a table per env-step (docs/telemetry.md) in one round; none where there is no
    file that can be read.
    """
    with _left_out(run / TABLES_FOLDER / table):
        path = table_files(run, table).get(number)
        return read_columns(path, table, names) if path else {}
    return {}


def rows_of(columns: Columns) -> Iterator[Row]:
    """The rows of a table. What is not finite is None, as JSON has no such numbers."""
    for first in range(0, len(next(iter(columns.values()), ())), ROWS_AT_ONCE):
        parts = [column[first : first + ROWS_AT_ONCE].tolist() for column in columns.values()]
        for cells in zip(*parts, strict=True):
            yield {name: _finite(cell) for name, cell in zip(columns, cells, strict=True)}


def _finite(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
