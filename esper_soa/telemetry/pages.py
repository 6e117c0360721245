"""Makes the tables of pages in docs/ from those in code: `python -m esper_soa.telemetry.pages
docs`.

A page is prose with blocks between `<!-- NAME -->` and `<!-- end -->`; the blocks of known names
are replaced, and the prose is left alone. A test holds page and code equal.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from esper_soa.telemetry.metric_meanings import SECTIONS, Metric
from esper_soa.telemetry.schema import KEYS, KINDS, TABLES, TYPES, Column
from esper_soa.telemetry.views import VIEWS

PAGES = ("telemetry.md", "queries.md", "metrics.md")
BLOCK = re.compile(r"<!-- (?P<name>[a-z. ]+) -->\n.*?<!-- end -->", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def columns_table(columns: Iterable[Column]) -> str:
    """Columns with type, unit and meaning."""
    return table(
        ("column", "type", "unit", "null", "meaning"),
        [
            (
                f"`{one.name}`",
                TYPES[one.type][1],
                one.unit or "-",
                "yes" if one.nullable else "",
                one.meaning,
            )
            for one in columns
        ],
    )


def kinds_table() -> str:
    """Kinds of events with their causes."""
    return table(
        ("kind", "of", "`cause`", "what happened"),
        [
            (
                f"`{kind.name}`",
                "seed" if kind.of_seed else "env",
                ", ".join(f"`{one}`" for one in kind.causes),
                kind.meaning,
            )
            for kind in KINDS
        ],
    )


def tables_table() -> str:
    """The tables, with what a row is."""
    return table(
        ("table", "from level", "a row is"),
        [(f"`{one.name}`", f"`{one.level}`", one.row) for one in TABLES],
    )


def views_table() -> str:
    """The views that can be asked, with the questions that they answer."""
    return table(("view", "question"), [(f"`{view.name}`", view.question) for view in VIEWS])


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Numbers with how to read them."""
    return table(
        ("name", "unit", "formula", "normal", "where it is not"),
        [
            (f"`{one.name}`", one.unit or "-", one.formula, one.normal or "-", one.remedy)
            for one in metrics
        ],
    )


def blocks() -> dict[str, str]:
    """What stands in each block."""
    found = {
        "tables": tables_table(),
        "kinds": kinds_table(),
        "keys": columns_table(KEYS),
        "views": views_table(),
    }
    found |= {name: metrics_table(metrics) for name, metrics in SECTIONS.items()}
    return found | {
        f"columns {one.name}": columns_table(one.columns[len(KEYS) :]) for one in TABLES
    }


def filled(page: str) -> str:
    """`page` with its blocks as they should be; raises KeyError for a block of an unknown name."""
    known = blocks()
    return BLOCK.sub(
        lambda found: f"<!-- {found['name']} -->\n{known[found['name']]}\n<!-- end -->", page
    )


def main(folder: str) -> None:
    """Bring the pages in `folder` up to date."""
    for name in PAGES:
        path = Path(folder) / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
