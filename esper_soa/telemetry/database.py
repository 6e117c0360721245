"""Runs as a DuckDB database: their tables as they lie on the disk, their lines of JSON, and the
views of views.py.

Opened by esper-query, and by whoever asks from Python: `open_database([folder]).sql("select ...")`.
Nothing is copied: a run that is still going on, or was killed, is read as far as it has come.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from esper_soa.ops.found_runs import find_run_folders, read_settings
from esper_soa.telemetry.schema import TABLES, TYPES, Table
from esper_soa.telemetry.table_files import table_files
from esper_soa.telemetry.views import EPISODES, ROUNDS, SETTINGS, VIEWS

try:
    import duckdb
except ImportError as error:
    raise ImportError("queries need DuckDB: pip install 'esper-soa[query]'") from error

QueryError = duckdb.Error  # what a question raises that cannot be answered
LINES = (("rounds", "metrics.jsonl", ROUNDS), ("episodes", "episodes.jsonl", EPISODES))


def open_database(folders: Sequence[str | Path]) -> duckdb.DuckDBPyConnection:
    """A database of the runs in `folders`, those of sweeps among them; `run` is the end of a run's
    path, as long as it must be to tell them apart.

    Raises UserError for a folder that holds no run.
    """
    runs = find_run_folders(folders)
    database = duckdb.connect(":memory:")
    database.execute("set threads = 2")
    for table in TABLES:
        database.execute(f"create view {table.name} as {_table_sql(table, runs)}")
    for name, file, columns in LINES:
        database.execute(f"create view {name} as {_lines_sql(file, columns, runs)}")
    _add_settings(database, runs)
    for view in VIEWS:
        database.execute(f"create view {view.name} as {view.sql}")
    return database


def _text(value: object) -> str:
    """A literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def _empty(columns: Mapping[str, str]) -> str:
    """A table of these columns without rows."""
    typed = ", ".join(f'null::{kind} as "{name}"' for name, kind in columns.items())
    return f"select null::varchar as run, {typed} where false"


def _together(parts: Iterable[str], columns: Mapping[str, str]) -> str:
    return " union all by name ".join([*parts, _empty(columns)])


def _table_sql(table: Table, runs: Mapping[str, Path]) -> str:
    """All files of a table."""
    parts = []
    for run, folder in runs.items():
        files = ", ".join(_text(path) for path in table_files(folder, table.name).values())
        if files:
            parts.append(
                f"select {_text(run)} as run, * from read_parquet([{files}], union_by_name = true)"
            )
    return _together(parts, {column.name: TYPES[column.type] for column in table.columns})


def _lines_sql(file: str, columns: Mapping[str, str], runs: Mapping[str, Path]) -> str:
    """All whole lines of a file of JSON."""
    types = ", ".join(f"{_text(name)}: {_text(kind)}" for name, kind in columns.items())
    options = f"format = 'newline_delimited', ignore_errors = true, columns = {{{types}}}"
    parts = [
        (
            f"select {_text(run)} as run, * from read_json({_text(folder / file)}, {options}) "
            "where "
            "round is not null"
        )
        for run, folder in runs.items()
        if (folder / file).is_file() and (folder / file).stat().st_size
    ]
    return _together(parts, columns)


def _add_settings(database: duckdb.DuckDBPyConnection, runs: Mapping[str, Path]) -> None:
    """The table `settings`, from config.yaml."""
    columns = ", ".join(f"{name} {kind}" for name, kind in SETTINGS.items())
    database.execute(f"create table settings (run varchar, {columns})")
    for run, folder in runs.items():
        rows = [
            [run, name, str(value)] for name, value in read_settings(folder / "config.yaml").items()
        ]
        if rows:
            database.executemany("insert into settings values (?, ?, ?)", rows)
