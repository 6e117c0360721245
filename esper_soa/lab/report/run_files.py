"""Reads run folders of finished, killed or active runs.

What is not there yet is no error: a report is of what has been written. What cannot be read is left
out, and said in a line of the log. Needs no torch.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from esper_soa.lab.run_folders import find_run_folders, read_settings
from esper_soa.lab.telemetry.table_files import read_file, table_files
from esper_soa.system.files import LOGGER, reason_of
from esper_soa.system.plain_files import read_text
from esper_soa.training.files.run_folder import RunFolder

Record = dict[str, object]
Cell: TypeAlias = None | int | float | str
Row: TypeAlias = dict[str, Cell]
Table: TypeAlias = dict[str, list[Cell]]  # columns of one length
MAX_JSON_DEPTH = 32  # records and lists within each other; those of a run are 5 deep


@dataclass(frozen=True)
class RunRecord:
    """A run by its files."""

    path: Path
    label: str  # that no other run of the report has
    settings: dict[str, object] = field(default_factory=dict)  # by dotted name
    overrides: list[str] = field(default_factory=list)
    versions: Record = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)  # lines of metrics.jsonl
    episodes: list[Record] = field(default_factory=list)  # lines of episodes.jsonl
    summary: Record = field(default_factory=dict)  # empty where the run has not come to its end
    group: str = ""  # the label of its group, see groups.py

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
    def gain(self) -> float | None:
        """Percent points over the control at the end; None where there is none."""
        return number(self.summary, "difference", "test_accuracy", "mean")

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
    return RunRecord(
        path,
        label or path.name,
        read_settings(folder.config),
        overrides=_text(folder.overrides).splitlines(),
        versions=read_json(folder.versions),
        rounds=read_lines(folder.metrics),
        episodes=read_lines(folder.episodes),
        summary=read_json(folder.summary),
    )


def read_lines(path: Path) -> list[Record]:
    """The records in a file of JSON lines."""
    records = (_parsed(line, path) for line in _text(path).splitlines())
    return [record for record in records if record]


def read_json(path: Path) -> Record:
    """The record in a JSON file; empty where there is none."""
    return _parsed(_text(path), path)


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        LOGGER.warning("report   without %s: %s", path, reason_of(error))
        return ""


def _parsed(text: str, path: Path) -> Record:
    """The record that `text`, out of the file `path`, holds as JSON."""
    try:
        record = json.loads(text or "{}")
        if _deeper(record, MAX_JSON_DEPTH):
            raise ValueError(f"more than {MAX_JSON_DEPTH} deep")
    except (ValueError, RecursionError) as error:
        LOGGER.warning("report   without a part of %s: %s", path, error)
        return {}
    return record if isinstance(record, dict) else {}


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(part, levels - 1) for part in inner)


def read_round(run: Path, table: str, number: int) -> list[Row]:
    """The rows of a table per env-step (docs/telemetry.md) in one round; none where there is no
    file that can be read. What is not finite is None, as JSON has no such numbers.
    """
    try:
        path = table_files(run, table).get(number)
        values = read_file(path, table).values if path else {}
    except (OSError, ValueError) as error:
        LOGGER.warning("report   without a table: %s", error)
        return []
    columns = {name: column.tolist() for name, column in values.items() if column.ndim == 1}
    return [
        {name: _finite(cell) for name, cell in zip(columns, cells, strict=True)}
        for cells in zip(*columns.values(), strict=True)
    ]


def _finite(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
