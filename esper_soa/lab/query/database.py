"""Runs as a DuckDB database: their tables as they lie on the disk, their lines of JSON, and VIEWS,
all with the column `run`. From Python: `open_database([folder]).sql("select ...")`. Nothing is
copied: a run that goes on, or was killed, is read as far as it has come. See docs/queries.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir

import pyarrow
import yaml
from pyarrow import parquet

from esper_soa.lab.run_folders import find_run_folders, read_settings
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.lab.telemetry.table_files import table_files
from esper_soa.system.errors import DataError, one_line, reading
from esper_soa.system.files import LOGGER
from esper_soa.training.files.run_folder import RunFolder

try:
    import duckdb
except ImportError as error:
    raise ImportError("queries need DuckDB: pip install 'esper-soa[query]'") from error

QueryError = duckdb.Error  # what a question raises that cannot be answered
DATABASE_FILE = files("esper_soa.lab.query") / "assets" / "database.yaml"
DATABASE = yaml.safe_load(DATABASE_FILE.read_text(encoding="utf-8"))
# By name the question that a view answers, and its SQL.
VIEWS: dict[str, dict[str, str]] = DATABASE["views"]


def open_database(
    folders: Sequence[str | Path], confined: bool = True
) -> duckdb.DuckDBPyConnection:
    """A database of the runs in `folders`, those of sweeps among them; `run` is the end of a run's
    path that tells it from others.

    confined: SQL reads and writes files in the folders of these runs alone, and its settings are
    locked. Files that cannot be read are left out, with a warning for each. Raises UserError for a
    folder that holds no run.
    """
    runs = find_run_folders(folders)
    database = duckdb.connect(":memory:")
    database.execute("set threads = 2")
    # what has no room in memory goes to a folder that nobody else has, made when it is needed
    spill = Path(gettempdir(), f"esper-query-{token_hex(8)}")
    database.execute(f"set temp_directory = {_text(spill)}")
    links = {link for folder in runs.values() for link in RunFolder(folder).not_plain}
    for link in sorted(links):
        LOGGER.warning("query    without %s: no plain file", one_line(link))
    for table, columns in TABLES.items():
        no_rows = database.from_arrow(columns.empty_table())
        types = dict(zip(no_rows.columns, no_rows.types, strict=True))
        parts_of = {
            run: [path for path in table_files(folder, table).values() if path not in links]
            for run, folder in runs.items()
        }
        if not _create(database, table, parts_of, types=types):  # one that is foreign spoils all
            parts_of = {run: list(_readable(paths, columns)) for run, paths in parts_of.items()}
            _create(database, table, parts_of, types=types)
    for name, lines in DATABASE["lines"].items():
        types = lines["columns"]
        columns = ", ".join(f"{_text(column)}: {_text(kind)}" for column, kind in types.items())
        options = f"format = 'newline_delimited', ignore_errors = true, columns = {{{columns}}}"
        parts = {}  # all whole lines
        for run, folder in runs.items():
            path = folder / lines["file"]
            if path not in links and path.is_file() and path.stat().st_size:
                parts[run] = f"read_json({_path(path)}, {options}) where round is not null"
        database.execute(f"create view {name} as {_together(parts, types)}")
    database.execute("create table settings (run varchar, name varchar, value varchar)")
    for run, folder in runs.items():
        for name, value in read_settings(folder / "config.yaml").items():
            database.execute("insert into settings values (?, ?, ?)", [run, name, str(value)])
    for name, view in VIEWS.items():
        database.execute(f"create view {name} as {view['sql']}")
    if confined:
        _confine(database, runs.values())
    return database


def _confine(database: duckdb.DuckDBPyConnection, folders: Iterable[Path]) -> None:
    """Let SQL read and write files in these folders alone; DuckDB asks where links in them lead."""
    # A name with signs of patterns is compared as it stands in our views.
    places = [place for folder in folders for place in (_text(folder), _path(folder))]
    database.execute(f"set allowed_directories = [{', '.join(places)}]")
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")


def _text(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def _path(path: Path) -> str:
    """A literal of SQL that is the name of this file alone, whatever signs of patterns it has."""
    return _text("".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path)))


def _create(
    database: duckdb.DuckDBPyConnection,
    table: str,
    files: Mapping[str, Sequence[Path]],
    types: Mapping[str, object],
) -> bool:
    """Make the view `table` of the files by run; returns whether its columns are of these types."""
    try:
        database.execute(f"create or replace view {table} as {_tables(files, types)}")
    except QueryError:
        return False
    made = {name: kind for name, kind, *_ in database.execute(f"describe {table}").fetchall()}
    return all(made[name] == str(kind) for name, kind in types.items())


def _readable(paths: Sequence[Path], columns: pyarrow.Schema) -> Iterator[Path]:
    """Those of the files that are tables with columns of our types, and none that we add."""
    known = {column.name: column.type for column in columns}
    for path in paths:
        try:
            with reading(path, DataError, "a table of ours"):
                for column in parquet.read_schema(path):
                    if column.type != known.get(column.name.lower(), column.type):
                        raise ValueError(f"{column.name} is {column.type}")
                    if column.name not in known and column.name.lower() in ("run", *known):
                        raise ValueError(f"it has a column {column.name}")
            yield path
        except DataError as error:
            LOGGER.warning("query    without a file: %s", error)


def _tables(files: Mapping[str, Sequence[Path]], types: Mapping[str, object]) -> str:
    """The files of a table by run, concatenated."""
    lists = {run: ", ".join(map(_path, paths)) for run, paths in files.items() if paths}
    read = "read_parquet([{}], union_by_name = true)"
    return _together({run: read.format(paths) for run, paths in lists.items()}, types)


def _together(parts: Mapping[str, str], types: Mapping[str, object]) -> str:
    """The parts of every run, by its name, concatenated; all columns even of nothing."""
    columns = ", ".join(f'null::{kind} as "{name}"' for name, kind in types.items())
    empty = f"select null::varchar as run, {columns} where false"
    selects = [f"select {_text(run)} as run, * from {part}" for run, part in parts.items()]
    return " union all by name ".join([*selects, empty])
