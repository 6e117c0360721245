"""The tables that a run wrote per env-step (docs/telemetry.md), one round at a time, as columns of
plain values.

The one place of the report that knows how they lie on disk. A run that wrote none is a run without
them; so is a file that cannot be read, which is said. Called by lanes.py. Needs no torch.
"""

from pathlib import Path

import numpy as np

from esper_soa.ops.files import LOGGER
from esper_soa.report.run_tables import Cell
from esper_soa.telemetry.table_files import read_file, table_files

Columns = dict[str, list[Cell]]


def rounds_of(run: Path, table: str) -> list[int]:
    """The rounds that the run has the table of, from 1, in order."""
    return list(table_files(run, table))


def read_round(run: Path, table: str, number: int) -> Columns:
    """The columns of a table in one round; none where there is no such file, or none that can be
    read.

    What is not finite is None, as JSON has no such numbers.
    """
    path = table_files(run, table).get(number)
    if path is None:
        return {}
    try:
        values = read_file(path, table).values
    except (OSError, ValueError) as error:
        LOGGER.warning("report   without a table: %s", error)
        return {}
    return {name: plain(column) for name, column in values.items() if column.ndim == 1}


def plain(column: np.ndarray) -> list[Cell]:
    """The values of a column [R]."""
    if column.dtype.kind == "f":
        return [float(value) if np.isfinite(value) else None for value in column]
    return [
        value if isinstance(value, str) else None if value is None else int(value)
        for value in column.tolist()
    ]
