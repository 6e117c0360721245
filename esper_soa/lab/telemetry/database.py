"""Runs as a DuckDB database: their tables as they lie on the disk, their lines of JSON, and VIEWS,
all with the column `run`. From Python: `open_database([folder]).sql("select ...")`. Nothing is
copied: a run that goes on, or was killed, is read as far as it has come. See docs/queries.md.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from esper_soa.lab.run_folders import find_run_folders, read_settings
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.lab.telemetry.table_files import table_files

try:
    import duckdb
except ImportError as error:
    raise ImportError("queries need DuckDB: pip install 'esper-soa[query]'") from error

QueryError = duckdb.Error  # what a question raises that cannot be answered
ASSET = files("esper_soa.lab.telemetry") / "assets" / "database.yaml"
KNOWN = yaml.safe_load(ASSET.read_text(encoding="utf-8"))
VIEWS: dict[str, dict[str, str]] = KNOWN["views"]  # by name: the question that it answers, and how


def open_database(folders: Sequence[str | Path]) -> duckdb.DuckDBPyConnection:
    """A database of the runs in `folders`, those of sweeps among them; `run` is the end of a run's
    path that tells it from others. Raises UserError for a folder that holds no run.
    """
    runs = find_run_folders(folders)
    database = duckdb.connect(":memory:")
    database.execute("set threads = 2")
    for table, columns in TABLES.items():
        nothing = database.from_arrow(columns.empty_table())
        parts = {}
        for run, folder in runs.items():
            paths = ", ".join(map(_text, table_files(folder, table).values()))
            if paths:
                parts[run] = f"read_parquet([{paths}], union_by_name = true)"
        types = dict(zip(nothing.columns, nothing.types, strict=True))
        database.execute(f"create view {table} as {_together(parts, types)}")
    for name, lines in KNOWN["lines"].items():
        types = lines["columns"]
        parts = {}
        for run, folder in runs.items():
            path = folder / lines["file"]
            if path.is_file() and path.stat().st_size:
                parts[run] = _json_lines(path, types)
        database.execute(f"create view {name} as {_together(parts, types)}")
    database.execute("create table settings (run varchar, name varchar, value varchar)")
    for run, folder in runs.items():
        for name, value in read_settings(folder / "config.yaml").items():
            database.execute("insert into settings values (?, ?, ?)", [run, name, str(value)])
    for name, view in VIEWS.items():
        database.execute(f"create view {name} as {view['sql']}")
    return database


def _text(value: object) -> str:
    """A literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def _json_lines(path: Path, types: Mapping[str, str]) -> str:
    """All whole lines of a file of JSON."""
    columns = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in types.items())
    options = f"format = 'newline_delimited', ignore_errors = true, columns = {{{columns}}}"
    return f"read_json({_text(path)}, {options}) where round is not null"


def _together(parts: Mapping[str, str], types: Mapping[str, object]) -> str:
    """What is read of every run, by its name, concatenated; all columns even of nothing."""
    columns = ", ".join(f'null::{kind} as "{name}"' for name, kind in types.items())
    empty = f"select null::varchar as run, {columns} where false"
    selects = [f"select {_text(run)} as run, * from {part}" for run, part in parts.items()]
    return " union all by name ".join([*selects, empty])
