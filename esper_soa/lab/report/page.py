"""The report as one HTML file: figures with the tables that they are drawn from, the program that
draws them, and the words and tables that stand in the page itself. A run, or a comparison of runs,
leaves it in its folder at its end.

Everything that comes out of a run folder is escaped: a run of somebody else's opens as safely as
one's own. Needs no torch, and vl-convert only for the program that draws.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import metadata
from logging import INFO, WARNING
from pathlib import Path
from typing import NamedTuple

from esper_soa.lab.report.bundle import MISSING_EXTRA, available, bundle
from esper_soa.lab.report.details import comparisons, details, measured_effects, updates
from esper_soa.lab.report.groups import RunGroup, groups_of
from esper_soa.lab.report.run_files import RunRecord, Table, find_runs
from esper_soa.lab.report.run_tables import pack_table
from esper_soa.lab.report.sections import Section, asset, charts, make_drawing
from esper_soa.lab.report.text import state_of, tiles_of, verdict_of
from esper_soa.lab.telemetry.worker import Failures
from esper_soa.system.files import LOGGER, write_text
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import Session

MAX_KINDS = 4  # of runs that the head names
ABOUT_PREFIXES = {"name": "", "task.name": "", "policy.name": "policy ", "reward.mode": "reward "}
# The page takes the scripts and styles that are marked, and can neither fetch nor send anything.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'nonce-{mark}'; script-src 'nonce-{mark}' "
    "'unsafe-eval'; img-src data: blob:"
)


class Parts(NamedTuple):
    """Contents of a page, without program and style."""

    title: str
    links: str  # HTML
    main: str  # HTML
    data: str  # JSON that can stand in a script element
    state: str  # how far the runs are
    ended: bool  # whether all have come to their end


def page_of(runs: Sequence[RunRecord], program: str) -> str:
    """The page; `program` is what draws its figures."""
    return page_html(parts_of(runs), [program, asset("page.js")], CONTENT_POLICY)


def parts_of(runs: Sequence[RunRecord]) -> Parts:
    """Contents of the page of these runs."""
    groups = groups_of(runs)
    sections, tables = make_drawing(groups)
    more = {"growth": comparisons(groups), "policy": updates(runs, tables)}
    more["seeds"] = measured_effects(runs)
    state, ended = state_of(runs)
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in sections)
    body = "".join(_section(section, more.get(section.id, "")) for section in sections)
    return Parts(
        escape(f"{runs[0].label if len(runs) == 1 else f'{len(runs)} runs'} - esper_soa"),
        links + '<a href="#settings">Settings</a>',
        f"\n{_opening(runs, groups)}{body}{details(runs)}<footer>Written by esper_soa "
        f"{escape(metadata.version('esper-soa'))}. This file works offline.</footer>\n",
        data=_data(sections, tables),
        state=state,
        ended=ended,
    )


def page_html(parts: Parts, programs: Sequence[str], policy: str, live: str = "") -> str:
    """A page. programs: its scripts; policy: what it may load, with places for the mark of scripts
    and style of ours, which nothing that stands in the page can know; live: HTML in its head.
    """
    content = f"{parts.main}{parts.data}".encode(errors="backslashreplace")
    mark = hashlib.sha256(content).hexdigest()
    scripts = "".join(f'<script nonce="{mark}">{program}</script>\n' for program in programs)
    head = asset("head.html").format(
        policy=policy.format(mark=mark),
        mark=mark,
        title=parts.title,
        style=asset("page.css"),
        links=parts.links,
        live=live,
    )
    return (
        f'{head}<main id="main">{parts.main}</main>\n'
        f'<script type="application/json" id="report-data">{parts.data}</script>\n'
        f"{scripts}</body>\n</html>\n"
    )


def _opening(runs: Sequence[RunRecord], groups: Sequence[RunGroup]) -> str:
    words, ended = state_of(runs)
    state = f'<span class="state{"" if ended else " unfinished"}">{escape(words)}</span>'
    tiles = "".join(
        f'<div class="tile"><dt>{escape(tile.title)}</dt><dd>{escape(tile.value)}</dd>'
        f'<dd class="note">{escape(tile.note)}</dd></div>'
        for tile in tiles_of(groups)
    )
    kinds = list(dict.fromkeys(escape(_about(run)) for run in runs))
    about = " · ".join(kinds[:MAX_KINDS]) + (" …" if len(kinds) > MAX_KINDS else "")
    return (
        f'{state}\n<h1>{escape(verdict_of(groups))}</h1>\n<p class="about">{about}</p>\n'
        f'<dl class="tiles">{tiles}</dl>\n'
        "<noscript><p>The figures need JavaScript; all of it is in this file.</p></noscript>\n"
    )


def _about(run: RunRecord) -> str:
    known = [(name, word) for name, word in ABOUT_PREFIXES.items() if name in run.settings]
    facts = [f"{word}{run.settings[name]}" for name, word in known]
    data = str(run.summary.get("data", "")).split(" (")[0]
    return ", ".join([*facts, data] if data else facts)


def _section(section: Section, more: str) -> str:
    """A section with its figures, not yet drawn, and more HTML below them."""
    narrow = [figure["id"] for figure in section.figures if not figure["wide"]]
    last_alone = narrow[-1:] if len(narrow) % 2 else []  # nothing would stand beside it
    figures = []
    for figure in section.figures:
        title = escape(figure["title"])
        wide = " class=wide" if figure["wide"] or figure["id"] in last_alone else ""
        figures.append(
            f'<figure id="{figure["id"]}"{wide}><figcaption><h3>{title}</h3>'
            f'<p>{escape(figure["caption"])}</p></figcaption><div class="choices"></div>'
            '<div class="chart"></div>'
            f"<details><summary>Table: {title}</summary></details></figure>\n"
        )
    name = section.id
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">'
        f"{escape(section.title)}</h2>\n<p>{escape(section.words)}</p>\n"
        f'<div class="figures">{"".join(figures)}{more}</div>\n</section>\n'
    )


def _data(sections: Sequence[Section], tables: Mapping[str, Table]) -> str:
    """Tables and figures as the page's program reads them; none can end the script element."""
    figures = [figure for section in sections for figure in section.figures]
    names = {name for figure in figures for name in (*figure["data"], figure["table"])}
    data = {
        "figures": figures,
        "tables": {name: pack_table(tables[name]) for name in sorted(names)},
        "config": charts()["config"],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def report_in(folder: Path) -> str:
    """Write the report of the runs in `folder` there; why there is none, else "". OSError."""
    if not available():
        return f"none, as {MISSING_EXTRA}"
    failures = Failures()
    text = ""
    with failures:
        text = page_of(find_runs([folder]), bundle())
    if failures.count:
        LOGGER.debug("%s", failures.trace)
        return f"none: {failures.last}"
    write_text(RunFolder(folder).report, text)
    return ""


def try_write_report(session: Session) -> None:
    """Write the report of a session at its end; why there is none is said in one line."""
    with session.write_errors.attempt(session.folder.report.name):
        missing = report_in(session.folder.path)
        if missing:
            LOGGER.log(WARNING if available() else INFO, "report   %s", missing)
