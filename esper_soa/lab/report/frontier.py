"""The figure of a study by esper-compare that has budgets, in files of its own. Needs no torch."""

import json
import re
from importlib import import_module
from pathlib import Path

from esper_soa.lab.report.bundle import MISSING_EXTRA, MODULE, available
from esper_soa.lab.report.run_files import (
    Table,
    read_json,
)
from esper_soa.lab.report.run_tables import frontier_rows, table_of
from esper_soa.lab.report.sections import asset, charts, make_figure
from esper_soa.lab.run_folders import COMPARISON_FILE
from esper_soa.lab.telemetry.worker import Failures
from esper_soa.system.files import write_bytes, write_text

FIGURE = "frontier"  # the name of the table, the figure and its files
FIGURE_WIDTH = 640  # pixels
LIGHT_COLOUR = re.compile(r"--(\w+): light-dark\((#\w+),")
VARIABLE = re.compile(r"var\(--(\w+)\)")


def write_frontier(folder: Path) -> str:
    """Write frontier.svg and frontier.pdf from compare.json in the folder; why there are none, or
    "". Raises OSError.
    """
    if not available():
        return f"none, as {MISSING_EXTRA}"
    table = table_of(frontier_rows(read_json(folder / COMPARISON_FILE)))
    failures = Failures()
    svg = ""
    pdf = b""
    with failures:
        spec = frontier_spec(table)
        converter = import_module(MODULE)
        svg = converter.vegalite_to_svg(spec)
        pdf = converter.vegalite_to_pdf(spec)
    if failures.count:
        return f"none: {failures.last}"
    write_text(folder / f"{FIGURE}.svg", svg)
    write_bytes(folder / f"{FIGURE}.pdf", pdf)
    return ""


def frontier_spec(table: Table) -> dict:
    """The figure in Vega-Lite with its data and the colours of a light page, of the first measure
    that the table has.
    """
    entries = (entry for section in charts()["sections"] for entry in section["figures"])
    drawn = [
        each for each in entries if each["data"] == FIGURE and any(table.get(each["value"], []))
    ]
    entry = drawn[0]
    figure = make_figure(entry, {FIGURE: table, "hosts": {}}, [])
    rows = [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
    spec = figure["spec"] | {
        "width": FIGURE_WIDTH,
        "background": "white",
        "config": charts()["config"],
        "datasets": {FIGURE: rows},
    }
    light = dict(LIGHT_COLOUR.findall(asset("page.css")))
    return dict(json.loads(VARIABLE.sub(lambda found: light[found[1]], json.dumps(spec))))
