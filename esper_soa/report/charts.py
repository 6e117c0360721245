"""Charts in the words of Vega-Lite: axes with units, what the pointer tells, and the kinds of
charts that a report has.

Colours are variables of the page's style, so that charts follow it between light and dark. Marks
that carry numbers are described to screen readers by their own titles; bands and lines, which only
join them, are not. Called by figures.py. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from esper_soa.ops.json_lines import Json

Spec = dict[str, Json]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # names the language; nothing is fetched
COLOURS = tuple(f"var(--c{number})" for number in range(1, 13))
# Of names that mean the same in every figure; nothing happens most of the time, and is to stay in
# the background.
OWN_COLOURS = {
    "wait": "var(--quiet)",
    "germinate": "var(--c1)",
    "set_alpha_target": "var(--c7)",
    "prune": "var(--c8)",
    "fossilize": "var(--c3)",
    "advance": "var(--c2)",
    "germinated": "var(--quiet)",
    "fossilized": "var(--c1)",
    "pruned": "var(--c8)",
    "conv_light": "var(--c1)",
    "attention": "var(--c3)",
    "norm": "var(--c2)",
    "depthwise": "var(--c6)",
    "bottleneck": "var(--c7)",
    "conv_small": "var(--c10)",
    "conv_heavy": "var(--c4)",
}
MUTED = "var(--muted)"
INK = "var(--ink)"
LINE = "var(--line)"
GRID = "var(--grid)"
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif"
CONFIG: Spec = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "domainColor": LINE,
        "tickColor": LINE,
        "gridColor": GRID,
        "titleFontWeight": 500,
        "titleFontSize": 11.5,
        "labelFontSize": 11,
        "titlePadding": 8,
        "labelPadding": 5,
        "labelSeparation": 6,
        "tickSize": 4,
    },
    "axisX": {"grid": False},
    "axisY": {
        "domain": False,
        "ticks": False,
        "tickCount": 5,
        "titleAnchor": "end",
        "titleAngle": 0,
        "titleAlign": "left",
        "titleY": -12,
        "titleX": 0,
    },
    "legend": {
        "labelColor": INK,
        "titleColor": MUTED,
        "orient": "bottom",
        "title": None,
        "labelFontSize": 11.5,
        "symbolStrokeWidth": 2.5,
        "symbolType": "circle",
        "columnPadding": 14,
        "labelLimit": 220,
        "symbolOpacity": 1,
        "columns": {"expr": "width < 420 ? 2 : 4"},
        "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
    },
    "range": {"category": list(COLOURS)},
    "rule": {"color": MUTED},
    "text": {"color": INK},
    "line": {"strokeCap": "round", "strokeJoin": "round"},
}


class Axis(NamedTuple):
    """A field and how it is told: its title holds the unit."""

    field: str
    title: str
    form: str = ",.4~g"  # of a number, in d3's words


RUN = Axis("run", "run", "")
GROUP = Axis("group", "group", "")
ROUND = Axis("round", "round", "d")
STEP = Axis("step", "env-step", "d")
HOST = Axis("host", "host", "d")
SLOT = Axis("slot", "slot", "")
BLUEPRINT = Axis("blueprint", "blueprint", "")
EVENT = Axis("event", "event", "")
CAUSE = Axis("cause", "cause", "")
ACCURACY = Axis("accuracy", "accuracy (%)", ".2f")


def described(*axes: Axis) -> list[Json]:
    """What the pointer tells of a mark; texts as they are."""
    named: list[Spec] = [{"field": axis.field, "title": axis.title} for axis in axes]
    return [
        name | ({"format": axis.form} if axis.form else {})
        for name, axis in zip(named, axes, strict=True)
    ]


# Where few whole numbers have much room, Vega puts ticks between them, which must not be told as
# whole ones.
WHOLE: Spec = {
    "tickMinStep": 1,
    "format": "d",
    "labelExpr": "datum.value % 1 ? '' : datum.label",
    "tickOpacity": {"condition": {"test": "datum.value % 1 == 0", "value": 1}, "value": 0},
}
# Numbers near 0 by their order: 1.5e-12 in place of 0.0000000000015.
SMALL: Spec = {
    "labelExpr": "datum.value && abs(datum.value) < 1e-4 ? format(datum.value, '~e') : datum.label"
}


def across(axis: Axis, whole: bool = False, zero: bool = False) -> Spec:
    """The x channel; whole: of whole numbers."""
    scale: Spec = {"zero": zero, "nice": not whole}
    steps = WHOLE if whole else SMALL
    return {
        "field": axis.field,
        "type": "quantitative",
        "title": axis.title,
        "axis": steps,
        "scale": scale,
    }


def upwards(axis: Axis, zero: bool = False) -> Spec:
    """The y channel; its title stands above the axis, where it can be read without turning the
    head.
    """
    scale: Spec = {"zero": zero}
    return {
        "field": axis.field,
        "type": "quantitative",
        "title": axis.title,
        "axis": SMALL,
        "scale": scale,
    }


def by_colour(field: str, names: Sequence[str], legend: bool = True) -> Spec:
    """The colour channel: every one of `names` keeps its colour, whichever of them are drawn."""
    colours = [
        OWN_COLOURS.get(name, COLOURS[place % len(COLOURS)]) for place, name in enumerate(names)
    ]
    channel: Spec = {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(names), "range": colours},
    }
    return channel if legend else channel | {"legend": None}


def chart(
    description: str, layers: Sequence[Mapping[str, Json]], height: int = 220, **more: Json
) -> Spec:
    """A chart as wide as its place; `description` is its name for who does not see it."""
    return {
        "$schema": SCHEMA,
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": list(layers),
        "padding": {"left": 2, "right": 10, "top": 18, "bottom": 4},
        **more,
    }


def layer(data: str, mark: Mapping[str, Json], **encoding: Json) -> Spec:
    """Marks from the table `data`."""
    return {"data": {"name": data}, "mark": dict(mark), "encoding": encoding}


def line_mark(width: float = 2.2, opacity: float = 1.0) -> Spec:
    """A line that joins points, which are told elsewhere."""
    return {"type": "line", "strokeWidth": width, "opacity": opacity, "aria": False}


def point_mark(size: int = 26, opacity: float = 1.0) -> Spec:
    """A point that tells its numbers."""
    return {"type": "point", "filled": True, "size": size, "opacity": opacity}


def stacked(description: str, data: str, value: Axis, name: str, names: Sequence[str]) -> Spec:
    """Bars per round, one on the other by the field `name`; negative values hang below 0."""
    y: Spec = {**upwards(value, zero=True), "stack": "zero"}
    tooltip = described(ROUND, Axis(name, name, ""), value)
    x: Spec = {
        "field": "round",
        "type": "ordinal",
        "title": "round",
        "axis": {"labelAngle": 0, "labelOverlap": "greedy"},
    }
    bars = layer(data, {"type": "bar"}, x=x, y=y, color=by_colour(name, names), tooltip=tooltip)
    return chart(description, [bars], height=240)


def lines(description: str, data: str, value: Axis, name: str, names: Sequence[str]) -> Spec:
    """A line per name over rounds."""
    x = across(ROUND, whole=True)
    y = upwards(value)
    color = by_colour(name, names)
    tooltip = described(ROUND, Axis(name, name, ""), value)
    return chart(
        description,
        [
            layer(data, line_mark(1.8), x=x, y=y, color=color),
            layer(data, point_mark(18), x=x, y=y, color=color, tooltip=tooltip),
        ],
    )
