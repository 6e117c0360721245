"""The files of tables in a run folder: where they are, which rounds there are, and reading them.

Needs no torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper_soa.config import LEVELS
from esper_soa.telemetry.parquet import Contents, table_from
from esper_soa.telemetry.schema import BY_NAME, TABLES, Table

FOLDER = "telemetry"
FILE = re.compile(r"round_(\d{6,18})\.parquet")


def table_path(folder: Path, table: str, number: int) -> Path:
    """The file of a table for round `number`, from 1, in the run folder `folder`."""
    return folder / FOLDER / table / f"round_{number:06d}.parquet"


def table_files(folder: Path, table: str) -> dict[int, Path]:
    """The files of a table by round, in order."""
    there = folder / FOLDER / table
    named = [(FILE.fullmatch(path.name), path) for path in there.glob("*")]
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def read_file(path: Path, table: str) -> Contents:
    """The columns of one file, see read_table, and metadata; ValueError for what is no table."""
    try:
        return table_from(path.read_bytes(), BY_NAME[table].columns)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_table(
    folder: str | Path, table: str, rounds: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """The columns of a table of a run, its rounds one after the other; `rounds`: those wanted, None
    = all there are.

    int32, float64, float32 and bool arrays [R], objects for texts, [R, K] for lists; where a column
    may be null, float64 with NaN, and None among texts. No rows where there are no files. Raises
    ValueError for what is no such table.
    """
    files = table_files(Path(folder), table)
    wanted = [path for number, path in files.items() if rounds is None or number in rounds]
    parts = [read_file(path, table).values for path in wanted]
    whole = [part for part in parts if len(part["round"])] or parts[:1]
    return {
        column.name: np.concatenate([part[column.name] for part in whole]) if whole else np.zeros(0)
        for column in BY_NAME[table].columns
    }


def keep_tables(folder: Path, rounds: int) -> None:
    """Remove the tables after the first `rounds`, which a resumed run makes anew; OSError."""
    for table in TABLES:
        for number, path in table_files(folder, table.name).items():
            if number > rounds:
                path.unlink(missing_ok=True)


def written_at(level: str) -> tuple[Table, ...]:
    """The tables that are written at a level, with those of the levels before it."""
    return tuple(table for table in TABLES if LEVELS.index(table.level) <= LEVELS.index(level))
