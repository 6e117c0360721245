"""The report as one HTML file: figures with the tables that they are drawn from, the program that
draws them, and the words and tables that stand in the page itself.

Everything that comes out of a run folder is escaped: a run of somebody else's opens as safely as
one's own. Called by write.py, live.py and end.py. Needs no torch, and vl-convert only for the
program that draws.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from esper_soa.ops.files import write_text
from esper_soa.ops.json_lines import Json
from esper_soa.report.bundle import bundle
from esper_soa.report.charts import CONFIG
from esper_soa.report.details import details
from esper_soa.report.figures import Figure, Section, Shown
from esper_soa.report.groups import groups_of
from esper_soa.report.run_files import RunRecord, find_runs
from esper_soa.report.run_tables import packed
from esper_soa.report.sections import shown_of
from esper_soa.report.words import state_of, tiles_of, verdict_of

NAME = "report.html"  # of a report in the folder of its run
MOST_KINDS = 4  # of runs that the head names
ASSETS = files("esper_soa.report") / "assets"
# The page runs what it holds, and can neither fetch anything nor send it anywhere.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' "
    "'unsafe-eval'; img-src data: blob:"
)
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header class="bar">
<div class="brand">esper<span>_soa</span></div>
{live}<nav aria-label="Sections">{links}</nav>
<div class="themes" role="group" aria-label="Colours">
<button type="button" data-set-theme="auto" aria-pressed="true">auto</button>
<button type="button" data-set-theme="light" aria-pressed="false">light</button>
<button type="button" data-set-theme="dark" aria-pressed="false">dark</button>
</div>
</header>
"""


def write_report(folders: Sequence[str], path: Path) -> None:
    """Write the report of the runs in `folders` to `path`.

    Raises UserError where there is no run or the extra `report` is not installed, OSError where it
    cannot be written.
    """
    write_text(path, page_of(find_runs(folders), bundle()))


class Parts(NamedTuple):
    """What a page shows of runs, apart from the program and style around it."""

    title: str
    links: str  # HTML
    main: str  # HTML
    data: str  # JSON that can stand in a script element


def page_of(runs: Sequence[RunRecord], program: str) -> str:
    """The page; `program` is what draws its figures."""
    return framed(parts_of(runs), f"<script>{program}</script>", POLICY)


def parts_of(runs: Sequence[RunRecord]) -> Parts:
    """What there is to be shown of runs."""
    groups = groups_of(runs)
    shown = shown_of(groups)
    links = "".join(f'<a href="#{one.id}">{escape(one.title)}</a>' for one in shown.sections)
    body = "".join(section_html(section) for section in shown.sections)
    return Parts(
        escape(f"{runs[0].label if len(runs) == 1 else f'{len(runs)} runs'} - esper_soa"),
        links + '<a href="#settings">Settings</a>',
        f"\n{_opening(runs)}{body}{details(groups)}{_footer()}",
        _data(shown),
    )


def framed(parts: Parts, program: str, policy: str, live: str = "", more: str = "") -> str:
    """A whole page; program: the script element of what draws; policy: what it may load; live: HTML
    beside the name; more: HTML at the end.
    """
    head = HEAD.format(
        policy=policy, title=parts.title, style=asset("page.css"), links=parts.links, live=live
    )
    return (
        f'{head}<main id="main">{parts.main}</main>\n'
        f'<script type="application/json" id="report-data">{parts.data}</script>\n'
        f"{program}\n<script>{asset('page.js')}</script>\n{more}</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """The text of a file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _opening(runs: Sequence[RunRecord]) -> str:
    """State, verdict and tiles."""
    groups = groups_of(runs)
    words, ended = state_of(runs)
    state = f'<span class="state{"" if ended else " unfinished"}">{escape(words)}</span>'
    tiles = "".join(
        f'<div class="tile"><dt>{escape(tile.title)}</dt><dd>{escape(tile.value)}</dd>'
        f'<dd class="note">{escape(tile.note)}</dd></div>'
        for tile in tiles_of(groups)
    )
    kinds = list(dict.fromkeys(escape(about_run(run)) for run in runs))
    about = " · ".join(kinds[:MOST_KINDS]) + (" …" if len(kinds) > MOST_KINDS else "")
    return (
        f'{state}\n<h1>{escape(verdict_of(groups))}</h1>\n<p class="about">{about}</p>\n'
        f'<dl class="tiles">{tiles}</dl>\n'
        "<noscript><p>The figures need JavaScript; all of it is in this file.</p></noscript>\n"
    )


def about_run(run: RunRecord) -> str:
    """Name, task, policy, reward and data, as far as they are known."""
    known = (
        ("", "name"),
        ("", "task.name"),
        ("policy ", "policy.name"),
        ("reward ", "reward.mode"),
    )
    facts = [f"{before}{run.settings[name]}" for before, name in known if name in run.settings]
    data = str(run.summary.get("data", "")).split(" (")[0]
    return ", ".join([*facts, data] if data else facts)


def section_html(section: Section) -> str:
    """A section with its figures, not yet drawn."""
    narrow = [figure.id for figure in section.figures if not figure.wide]
    alone = narrow[-1:] if len(narrow) % 2 else []  # nothing would stand beside it
    figures = "".join(
        figure_html(figure._replace(wide=figure.wide or figure.id in alone))
        for figure in section.figures
    )
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">\n<h2 '
        f'id="{section.id}-title">'
        f"{escape(section.title)}</h2>\n<p>{escape(section.words)}</p>\n"
        f'<div class="figures">{figures}</div>\n</section>\n'
    )


def figure_html(figure: Figure) -> str:
    """The place of a figure, its words and the table behind it."""
    height = figure.spec.get("height", 200)
    return (
        f'<figure id="{figure.id}"{" class=wide" if figure.wide else ""}><figcaption><h3>{escape(figure.title)}</h3>'  # noqa: E501
        f'<p>{escape(figure.caption)}</p></figcaption><div class="choices"></div>'
        f'<div class="chart" style="min-height:{height}px"></div>'
        f"<details><summary>Table: {escape(figure.title)}</summary></details></figure>\n"
    )


def _footer() -> str:
    return (
        f"<footer>Written by esper_soa {escape(metadata.version('esper-soa'))}. This file asks "
        "no network.</footer>\n"
    )


def _data(shown: Shown) -> str:
    """Tables and figures as the page's program reads them; nothing in it can end the script
    element.
    """
    figures: list[Json] = [
        _figure(figure) for section in shown.sections for figure in section.figures
    ]
    drawn = {
        name
        for section in shown.sections
        for figure in section.figures
        for name in (*figure.data, figure.table)
    }
    wanted = drawn | {
        choice.table
        for section in shown.sections
        for figure in section.figures
        for choice in figure.choices
    }
    tables: dict[str, Json] = {
        name: packed(table) for name, table in shown.tables.items() if name in wanted
    }
    text = json.dumps(
        {"figures": figures, "tables": tables, "config": CONFIG},
        separators=(",", ":"),
        allow_nan=False,
    )
    return text.replace("<", "\\u003c")


def _figure(figure: Figure) -> dict[str, Json]:
    return {
        "id": figure.id,
        "title": figure.title,
        "spec": figure.spec,
        "table": figure.table,
        "data": list(figure.data),
        "columns": [list(column) for column in figure.columns],
        "choices": [choice._asdict() for choice in figure.choices],
    }
