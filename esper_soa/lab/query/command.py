"""The command line for SQL queries over runs: `esper-query RUN "select round, eps from rounds"`.

Also `python -m esper_soa.lab.query.command`. Exit status: 0 done, 1 a question that the runs cannot
answer, 2 a mistake that we found before it was asked.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import UserError, check, check_choice
from esper_soa.system.signals import import_guard

# Settings of the command with their defaults.
SETTINGS = {"format": "table", "limit": "50", "files": "runs"}
FORMATS = ("table", "csv", "json")
HELP = """\
  RUN           one or more run folders, or folders that hold some, as a sweep does
  "select ..."  the question; without one, the views are listed with what they answer
  format=table  table, csv, or json (a line per row)
  limit=50      most rows of a table; csv and json have them all
  files=runs    files that SQL may read and write: those in the folders of the runs, or any

  tables: steps, slots, events, choices, subsets, control_steps, rounds, episodes, settings

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
    check(bool(places), "RUN", "''", allowed="a run folder")
    try:
        with import_guard():
            from esper_soa.lab.query.database import VIEWS, QueryError, open_database
    except ImportError as error:
        missing = f"esper-query needs {error.name}, which is not installed"
        raise UserError(missing if error.name else str(error)) from error
    try:
        database = open_database(places, settings["files"] == "runs")
        answer = database.execute(question) if asks else None
        rows = answer.fetchall() if answer else []
    except QueryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not asks:
        views = [(name, view["question"]) for name, view in VIEWS.items()]
        show(views, ("view", "question"), settings)
        return 0
    check(answer is not None, "the question", question, allowed="a statement of SQL")
    show(rows, [column[0] for column in (answer and answer.description) or ()], settings)
    return 0


def show(
    rows: Sequence[Sequence[object]], columns: Sequence[str], settings: dict[str, str]
) -> None:
    """Print rows as the settings ask for it."""
    if settings["format"] == "csv":
        csv.writer(sys.stdout).writerows([columns, *rows])
        return
    if settings["format"] == "json":
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True)), default=str))
        return
    table = Table(box=box.SIMPLE_HEAD)
    most = int(settings["limit"])
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in rows[:most]:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console().print(table)
    if len(rows) > most:
        print(f"{len(rows) - most} rows more: limit={len(rows)} shows all")


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
