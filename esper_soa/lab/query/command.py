"""The command line for SQL queries over runs: `esper-query RUN "select round, eps from rounds"`.

Also `python -m esper_soa.lab.query.command`. Exit status: 0 done, 1 a question that the runs cannot
answer, 2 a mistake that we found before it was asked.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import chain, count, islice
from math import isfinite

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import UserError, check, check_choice, printable
from esper_soa.system.json_lines import Json
from esper_soa.system.signals import import_guard

# Settings of the command with their defaults.
SETTINGS = {"format": "table", "limit": "50", "files": "runs"}
FORMATS = ("table", "csv", "json")
ROWS_AT_ONCE = 1024
HELP = """\
  RUN           one or more run folders, or folders that hold some, as a sweep does
  "select ..."  the question; without one, the views are listed with what they answer
  format=table  table, csv, or json (a line per row)
  limit=50      most rows of a table; csv and json have them all
  files=runs    files that SQL may read and write: those in the folders of the runs, or any

  tables: steps, slots, events, choices, subsets, control_steps, effects, rounds, episodes,
    settings

  esper-query runs/main "select blueprint, fate, count(*) from seed_lifecycle group by all"

Needs DuckDB: pip install 'esper-soa[query]'. docs/queries.md has questions with their SQL.
"""


def main(arguments: list[str] | None = None) -> None:
    usage = 'esper-query RUN... ["select ..."] [format=table] [limit=50] [files=runs]'
    words = parser(usage, "Ask runs in SQL.", HELP)
    words.add_argument("words", nargs="+", help=argparse.SUPPRESS)
    with ending_with_status():
        status = run_query(words.parse_args(arguments).words)
    sys.exit(status)


def run_query(words: Sequence[str]) -> int:
    """Answer the question among `words`, or list the views; returns the exit status."""
    named = [word for word in words if word.startswith(tuple(f"{name}=" for name in SETTINGS))]
    places = [word for word in words if word not in named]
    settings = SETTINGS | dict(word.split("=", 1) for word in named)
    check_choice("format", settings["format"], FORMATS)
    check_choice("files", settings["files"], ("runs", "any"))
    limit = settings["limit"]
    check(limit.isdecimal() and len(limit) < 10, "limit", limit, allowed="a number of rows")
    last = places[-1] if places else ""
    asks = " " in last and not os.path.isdir(os.path.expanduser(last))
    question = places.pop() if asks else ""
    remedy = 'A question in quotes comes after it: esper-query RUN "select * from runs".'
    ok = bool(places) and "select" not in places
    check(ok, "RUN", " ".join(places), allowed="a run folder", remedy=remedy)
    try:
        with import_guard():
            from esper_soa.lab.query.database import VIEWS, QueryError, open_database
    except ImportError as error:
        missing = f"esper-query needs {error.name}, which is not installed"
        raise UserError(missing if error.name else str(error)) from error
    try:
        database = open_database(places, settings["files"] == "runs")
        if not asks:
            views = [(name, view["question"]) for name, view in VIEWS.items()]
            show(views, ("view", "question"), settings)
            return 0
        answer = database.execute(question)
        check(answer is not None, "the question", question, allowed="a statement of SQL")
        parts = iter(lambda: answer.fetchmany(ROWS_AT_ONCE), [])
        columns = [column[0] for column in answer.description or ()]
        show(chain.from_iterable(parts), columns, settings)
    except QueryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def show(
    rows: Iterable[Sequence[object]], columns: Sequence[str], settings: dict[str, str]
) -> None:
    """Print rows as the settings ask for it."""
    rows = iter(rows)
    if settings["format"] == "csv":
        csv.writer(sys.stdout).writerows(chain([columns], rows))
        return
    if settings["format"] == "json":
        names: list[str] = []
        for name in columns:
            others = (f"{name}_{number}" for number in count(2))
            free = (other for other in others if other not in (*names, *columns))
            names.append(next(free) if name in names else name)
        for row in rows:
            record = {name: _json(value) for name, value in zip(names, row, strict=True)}
            print(json.dumps(record, allow_nan=False))
        return
    table = Table(box=box.SIMPLE_HEAD)
    most = int(settings["limit"])
    for name in columns:
        table.add_column(Text(printable(name)), overflow="fold")
    for row in islice(rows, most):
        table.add_row(*(Text(_cell(value)) for value in row))
    Console().print(table)
    left = sum(1 for _ in rows)
    if left:
        print(f"{left} rows more: limit={most + left} shows all")


def _json(value: object) -> Json:
    """The value as JSON has it (RFC 8259): null for NaN and infinity, texts for other types."""
    if isinstance(value, float | Decimal):
        number = float(value)
        return number if isfinite(number) else None
    if isinstance(value, dict):
        return {str(name): _json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return value if value is None or isinstance(value, int | str) else str(value)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else printable(str(value))


if __name__ == "__main__":
    main()
