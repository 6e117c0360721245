"""The sections and figures of a report that assets/charts.yaml lists, filled in from the tables
that they are drawn from. One that would have nothing to show is left out. Needs no torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml

from esper_soa.lab.report import effects, env_steps, lanes, run_tables
from esper_soa.lab.report.groups import RunGroup, standings, study_of
from esper_soa.lab.report.run_files import Row, RunRecord, Table
from esper_soa.lab.report.text import UNKNOWN_NUMBER
from esper_soa.system.json_lines import Json

ASSETS = files("esper_soa.lab.report") / "assets"
NUM_COLOURS = 12  # of page.css: --c1 to --c12
# Fields of tooltips: of several runs alone, and of the spread of one run.
OF_SEVERAL = ("group", "runs")
OF_HOSTS = ("_min", "_max")
FIGURE_HEIGHT = 220  # pixels; of a lane, and of a row of bars:
LANE_HEIGHT = 19
ROW_HEIGHT = 40
BAR_HEIGHT = 24
STRIP_HEIGHT = 46  # below the axis of a figure, for what happened to seeds
# Fields of a figure that it has in charts.yaml.
FIGURE_FIELDS = ("id", "title", "caption", "table", "choices", "wide")


class Section(NamedTuple):
    """Figures that answer one question."""

    id: str
    title: str
    words: str
    # page.js reads FIGURE_FIELDS (`table`: opened beside it, `choices`: fields of which the reader
    # chooses one value), `spec` in Vega-Lite, `data` (tables that it draws from), and `columns` of
    # its table, each a field, a title, and a text that stands for a missing number.
    figures: list[dict]


def asset(name: str) -> str:
    """The text of a file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def charts() -> dict:
    """The content of charts.yaml."""
    return dict(yaml.safe_load(asset("charts.yaml")))


def make_drawing(groups: Sequence[RunGroup]) -> tuple[list[Section], dict[str, Table]]:
    """Everything that a report draws, and the tables that it is drawn from."""
    runs = [run for group in groups for run in group.runs]
    tables = tables_of(groups, runs)
    kind = "of several" if len(runs) > 1 else "of one run"
    sections = []
    for section in charts()["sections"]:
        figure_entries = (_adapt_figure(entry, tables) for entry in section["figures"])
        figures = [
            make_figure(entry, tables, runs)
            for entry in figure_entries
            if entry["kind"] and any(tables[entry["data"]].get(entry["value"], []))
        ]
        ids = [figure["id"] for figure in figures]
        words = [section["words"], section.get(kind, "")]
        words += [sentence for name, sentence in section.get("else", {}).items() if name not in ids]
        text = " ".join(sentence for sentence in words if sentence)
        sections.append(Section(section["id"], section["title"], text, figures=figures))
    return sections, tables


def tables_of(groups: Sequence[RunGroup], runs: Sequence[RunRecord]) -> dict[str, Table]:
    """Every table by its name; env-steps where there is no second round."""
    rounds = lanes.chosen_rounds(runs)
    lines = run_tables.table_of(run_tables.round_rows(runs))
    single = [] if any(len(run.rounds) > 1 for run in runs) else runs
    steps = run_tables.table_of(env_steps.step_rows(single))
    rows: dict[str, Iterable[Row]] = {
        "step_means": run_tables.mean_rows(steps, "step"),
        "fates": env_steps.fate_rows(single),
        "standings": run_tables.standing_rows(standings(groups) if len(runs) > 1 else []),
        "finals": run_tables.final_rows(runs),
        "means": run_tables.mean_rows(lines, "round"),
        "hosts": run_tables.host_rows(runs),
        "frontier": run_tables.frontier_rows(study_of(groups) if len(runs) > 1 else {}),
        "settings": run_tables.setting_rows(runs),
        "lanes": lanes.lane_rows(rounds),
        "accuracies": lanes.accuracy_rows(rounds),
        "hostnames": lanes.name_rows(rounds),
        "marks": lanes.mark_rows(rounds),
        "blueprints": run_tables.blueprint_rows(runs),
        "paid": run_tables.paid_rows(runs),
        "effects": effects.effect_rows(runs),
    } | {name: run_tables.part_rows(runs, name) for name in run_tables.PART_READERS}
    made = {name: run_tables.table_of(table_rows) for name, table_rows in rows.items()}
    return {"steps": steps, "rounds": lines} | made


def _adapt_figure(entry: dict, tables: Mapping[str, Table]) -> dict:
    """A figure that charts.yaml lists, as it is where only one round has been played: over
    env-steps, or with bars; `kind` is empty where it would be a single point.
    """
    rounds = tables["rounds"].get("round", [])
    if len(set(rounds)) > 1:
        return entry
    if entry["kind"] == "cost":
        return entry | ({"data": "steps", "x": "step"} if tables["steps"] else {})
    kind = entry["kind"] if entry.get("x") == "step" else None
    kind = kind or charts()["of one round"].get(entry["kind"], entry["kind"])
    return entry | {"kind": kind} | ({"rows": entry["by"]} if kind == "bars" else {})


def make_figure(chart_entry: dict, tables: Mapping[str, Table], runs: Sequence[RunRecord]) -> dict:
    """A figure that charts.yaml lists, with the values that its kind of chart asks for."""
    entry: dict = {"table": chart_entry["data"], **charts()["left_out"], **chart_entry}
    data = tables[entry["data"]]
    value = entry["value"]
    ended = value == "accuracy" and "control" in tables["hosts"].get("hosts", [])
    course = value == "accuracy" and any(data.get("control_accuracy", []))
    spread = len(runs) == 1 and f"{value}_min" in data
    left_out = (() if len(runs) > 1 else OF_SEVERAL) + (() if spread else OF_HOSTS)
    # in the order in which they come; of groups also those that have nothing to draw
    named = (run.group for run in runs) if entry["by"] == "group" else data.get(entry["by"], [])
    names = entry["names"] or [str(name) for name in dict.fromkeys(named) if name != "none"]
    entry |= _colours(entry["by"], names) | {
        "x_title": _title(entry["x"]),
        "value_title": _title(value),
        "low": f"{value}_min" if spread else "",
        "high": f"{value}_max",
        "lower": f"{value}_low",
        "upper": f"{value}_high",
        "hosts": bool(tables["hosts"]),
        "control_course": course,
        "control": ended and not course,
        "shared": 2 * len({*data.get("value", [])}) < len(data.get("value", [])),
        "scale": "log" if all(float(v or 0) > 0 for v in data.get("value", [])) else "linear",
        "tooltip": [name for name in entry["tooltip"] if not name.endswith(left_out)],
        "way_tooltip": [entry["x"] if name == "round" else name for name in entry["way_tooltip"]],
        "offset": STRIP_HEIGHT if entry["strip"] else 0,
    }
    row = BAR_HEIGHT if entry["kind"] == "bars" else ROW_HEIGHT
    height = 50 + row * len({*data[entry["rows"]]}) if entry["rows"] else FIGURE_HEIGHT
    if entry["kind"] == "lanes":
        # for as many hosts as there are, or as a screen has
        slots = max((run.slots for run in runs), key=len)
        hosts = 1 + max(int(host or 0) for host in tables["accuracies"]["host"])
        rows = min(lanes.hosts_on_screen(len(slots)), hosts) * (len(slots) + lanes.HEAD_LANES)
        entry |= {"lane_axis": _lane_axis(slots, rows), "lane_domain": [-rows, 0]}
        height = LANE_HEIGHT * rows
    spec = chart(entry["kind"], entry["title"], height, values=entry)
    return {name: entry[name] for name in FIGURE_FIELDS} | {
        "spec": spec,
        "data": sorted({layer["data"]["name"] for layer in spec["layer"]}),
        "columns": [
            [name, _title(name), charts()["missing"].get(name, UNKNOWN_NUMBER)]
            for name in entry["columns"]
        ],
    }


def _colours(field: str, names: list[str]) -> dict:
    """Every one of `names` keeps its colour, whichever are drawn. A lone group needs no legend."""
    fixed = charts()["colours"]
    codes = [fixed.get(name, f"c{1 + place % NUM_COLOURS}") for place, name in enumerate(names)]
    colours = [f"var(--{code})" for code in codes]
    legend: Json = None if field == "group" and len(names) == 1 else {}
    return {"names": names, "colours": colours, "legend": legend}


def _lane_axis(slots: Sequence[str], rows: int) -> dict:
    """The axis runs down from the first host's name; a slot's name stands beside its lane."""
    block = len(slots) + lanes.HEAD_LANES
    values: Json = [-(row + 0.55) for row in range(rows) if row % block >= lanes.HEAD_LANES]
    words = f"{json.dumps(slots)}[round(-datum.value - 0.55) % {block} - {lanes.HEAD_LANES}]"
    return {**charts()["lane_axis"], "values": values, "labelExpr": words, "tickCount": rows}


def chart(kind: str, description: str, height: int, values: Mapping[str, Json]) -> dict:
    """A chart as wide as its place; values: what stands for the $names of the kind's layers."""
    return {
        **charts()["chart"],
        "description": description,
        "height": height,
        "layer": [
            {name: _fill_template(part, values) for name, part in layer.items() if name != "if"}
            for layer in charts()["kinds"][kind]
            if "if" not in layer or _fill_template(layer["if"], values)
        ],
    }


def _fill_template(template: Json, values: Mapping[str, Json]) -> Json:
    if isinstance(template, dict):
        filled = {name: _fill_template(part, values) for name, part in template.items()}
        fields = filled.get("tooltip")
        if isinstance(fields, list):
            filled["tooltip"] = [_tooltip(name) for name in fields]
        return filled
    if isinstance(template, list):
        return [_fill_template(part, values) for part in template]
    if isinstance(template, str) and template.startswith("$"):
        return values[template[1:]]
    return template


def _tooltip(name: str) -> dict:
    title, *form = charts()["fields"][name]
    return {"field": name, "title": title} | ({"format": form[0]} if form else {})


def _title(field: str) -> str:
    return str(charts()["fields"][field][0])
