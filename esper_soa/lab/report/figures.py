"""Figures of a report in files: SVG, PDF and PNG, in the colours of a light page. Needs no torch,
and vl-convert to draw them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from esper_soa.lab.report.bundle import MISSING_EXTRA, MODULE, available
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.run_files import Row, RunRecord, Table, read_json
from esper_soa.lab.report.run_tables import frontier_rows, table_of
from esper_soa.lab.report.sections import asset, charts, make_drawing, make_figure
from esper_soa.lab.run_folders import COMPARISON_FILE
from esper_soa.lab.telemetry.worker import Failures
from esper_soa.system.errors import UserError
from esper_soa.system.files import write_bytes

FRONTIER = "frontier"  # the name of the table, the figure and its files
WIDTH = 640  # pixels
FULL_WIDTH = 960
PNG_SCALE = 3.0  # pixels of a PNG per pixel
STROKE_BELOW = '<text paint-order="stroke" '  # letters over their edge, as by page.css
LIGHT_COLOUR = re.compile(r"--(\w+): light-dark\((#\w+),")
VARIABLE = re.compile(r"var\(--(\w+)\)")
MIXTURE = re.compile(r"color-mix\(in srgb, #(\w{6}) (\d+)%, #(\w{6})\)")


def write_figures(runs: Sequence[RunRecord], folder: Path) -> list[str]:
    """Write every figure of the report of `runs` into `folder`, and return a line for each.

    Of figures with choices, that is drawn which the page shows first. Raises UserError without
    figures or without the extra `report`, and OSError.
    """
    if not available():
        raise UserError(MISSING_EXTRA)
    sections, tables = make_drawing(groups_of(runs))
    figures = [figure for section in sections for figure in section.figures]
    if not figures:
        raise UserError("these runs have nothing to draw: no round is done")
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for figure in figures:
        rows = {name: rows_of(tables[name]) for name in figure["data"]}
        every = [row for table in rows.values() for row in table]
        chosen = {
            name: next(row[name] for row in every if name in row) for name in figure["choices"]
        }
        for table in rows.values():
            table[:] = [row for row in table if row.items() >= chosen.items()]
        width = FULL_WIDTH if figure["wide"] else WIDTH
        for name, content in draw(figure_spec(figure, rows, width)).items():
            write_bytes(folder / f"{figure['id']}.{name}", content)
        words = ", ".join(f"{name} {value}" for name, value in chosen.items())
        lines.append(f"{figure['id']}: {figure['title']}{words and f' ({words})'}")
    return lines


def rows_of(table: Table) -> list[Row]:
    """The rows of a table of columns."""
    return [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]


def figure_spec(figure: Mapping, rows: Mapping[str, Sequence[Row]], width: int) -> dict:
    """A figure in Vega-Lite with its data, and the colours of a light page."""
    style = {"width": width, "background": "white", "config": charts()["config"]}
    light = dict(LIGHT_COLOUR.findall(asset("page.css")))
    text = VARIABLE.sub(lambda found: light[found[1]], json.dumps(figure["spec"] | style))
    return json.loads(MIXTURE.sub(_mixed, text)) | {"datasets": dict(rows)}


def _mixed(found: re.Match[str]) -> str:
    """The colour of a color-mix of the page's style, which files have no word for."""
    share = int(found[2]) / 100
    pairs = zip(bytes.fromhex(found[1]), bytes.fromhex(found[3]), strict=True)
    return "#" + bytes(round(share * mine + (1 - share) * other) for mine, other in pairs).hex()


def draw(spec: dict) -> dict[str, bytes]:
    """The contents of the files of a figure by their ending."""
    converter = import_module(MODULE)
    svg = converter.vegalite_to_svg(spec).replace("<text ", STROKE_BELOW)
    png = converter.svg_to_png(svg, scale=PNG_SCALE)
    return {"svg": svg.encode(), "pdf": converter.svg_to_pdf(svg), "png": png}


def write_frontier(folder: Path) -> str:
    """Write frontier.svg, .pdf and .png from compare.json in the folder; why there are none, or "".
    Raises OSError.
    """
    if not available():
        return f"none, as {MISSING_EXTRA}"
    table = table_of(frontier_rows(read_json(folder / COMPARISON_FILE)))
    entries = (entry for section in charts()["sections"] for entry in section["figures"])
    failures = Failures()
    contents = dict[str, bytes]()
    with failures:
        of_study = (entry for entry in entries if entry["data"] == FRONTIER)
        entry = next(entry for entry in of_study if any(table.get(entry["value"], [])))
        figure = make_figure(entry, {FRONTIER: table, "hosts": {}}, [])
        contents = draw(figure_spec(figure, {FRONTIER: rows_of(table)}, WIDTH))
    for name, content in contents.items():
        write_bytes(folder / f"{FRONTIER}.{name}", content)
    return f"none: {failures.last}" if failures.count else ""
