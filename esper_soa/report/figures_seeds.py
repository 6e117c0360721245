"""The figures about seeds: their lives in the slots of every host, what became of each blueprint,
what each was worth.

Given the tables of a report by sections.py. Needs no torch.
"""

from collections.abc import Mapping, Sequence

from esper_soa.ops.json_lines import Json
from esper_soa.report.charts import (
    ACCURACY,
    BLUEPRINT,
    CAUSE,
    EVENT,
    HOST,
    INK,
    MUTED,
    SLOT,
    STEP,
    Axis,
    Spec,
    across,
    by_colour,
    chart,
    described,
    layer,
    line_mark,
    point_mark,
    upwards,
)
from esper_soa.report.figures import Choice, Figure, columns, distinct
from esper_soa.report.lanes import GONE, HEAD, LIVE, hosts_on_screen
from esper_soa.report.run_tables import Table

LANE = 19  # pixels
FOOT = 0.08  # of a lane of 1: where alpha 0 lies, and the height of alpha 1
FULL = 0.8
STAGES = ("germinated", "training", "blending", "holding", "fossilized", "embargoed")
# A seed that comes of age grows darker; one that is gone is red.
DARKER = (18, 32, 50, 70, 95)
STAGE_INKS = (
    *(f"color-mix(in srgb, var(--ink) {share}%, var(--card))" for share in DARKER),
    "var(--bad)",
)
MARKS = {
    "germinated": "triangle-up",
    "blended": "triangle-right",
    "fossilized": "diamond",
    "pruned": "cross",
    "rollback": "square",
    "ended_early": "circle",
}
FATES = ("germinated", "fossilized", "pruned")
# What is read out of a stretch of a lane.
TOLD = (
    "'host ' + datum.host + ', ' + datum.slot + ': ' + datum.blueprint + ', ' + datum.stage"
    " + ', env-steps ' + datum.from + ' to ' + datum.to + ', alpha ' + format(datum.alpha, '.2f')"
    " + (isValid(datum.contribution) ? ', contribution ' + format(datum.contribution, '+.2f') + ' "
    "points' : '')"
)
# With an edge in the colour of the card, painted below the letters, so that lines do not cross
# them.
NAME: Spec = {
    "type": "text",
    "align": "left",
    "baseline": "bottom",
    "fontSize": 11,
    "fontWeight": 600,
    "dx": 3,
    "stroke": "var(--card)",
    "strokeWidth": 4,
}
TIME: Spec = {"field": "step", "type": "quantitative"}
LANES_CAPTION = (
    "A lane per slot. Height is alpha, how much of the seed the host takes on; colour is the "
    "blueprint; the strip at "
    "the foot darkens from stage to stage. The grey line above is the host's accuracy. Marks: "
    "germinated ▲, blended ▶, "
    "fossilised ◆, pruned ✚, host rolled back ■, episode ended early ●."
)


def lanes_figure(
    shown: Mapping[str, Table], slots: Sequence[str], choices: Sequence[Choice]
) -> Figure | None:
    """A lane per slot of every host: stage along its foot, alpha as height, blueprint as colour."""
    if not shown["lanes"]:
        return None
    hosts = min(
        hosts_on_screen(len(slots)), 1 + max(int(host or 0) for host in shown["accuracies"]["host"])
    )
    rows = hosts * (len(slots) + HEAD)
    name = "Swim lanes: what stood in every slot of every host, env-step by env-step"
    spec = chart(name, _lane_layers(shown, slots, rows), rows * LANE)
    listed = columns(
        "round",
        "host",
        "slot",
        ("from", "after env-step"),
        ("to", "to env-step"),
        "blueprint",
        "stage",
        "seed",
        ("alpha", "alpha", 3),
        ("contribution", "contribution (percent points)", 3),
        ("shapley", "Shapley value (percent points)", 3),
    )
    screens = [*choices, Choice("round", "Round", "lanes"), Choice("hosts", "Hosts", "accuracies")]
    drawn = ["lanes", "accuracies", "hostnames", "marks"]
    return Figure(
        "lanes",
        "Lives of the seeds",
        LANES_CAPTION,
        spec,
        "lanes",
        listed,
        drawn,
        screens,
        wide=True,
    )


def _lane_layers(shown: Mapping[str, Table], slots: Sequence[str], rows: int) -> list[Spec]:
    start: Spec = {
        **across(Axis("from", "env-step"), whole=True),
        "scale": {"nice": False, "zero": True},
    }
    blueprints = [name for name in distinct(shown["lanes"], "blueprint") if name != "none"]
    told = described(
        HOST,
        SLOT,
        BLUEPRINT,
        Axis("stage", "stage", ""),
        Axis("from", "after env-step", "d"),
        Axis("to", "to env-step", "d"),
        Axis("alpha", "alpha", ".2f"),
        Axis("contribution", "contribution (points)", "+.2f"),
        Axis("shapley", "Shapley value (points)", "+.2f"),
    )
    axis = _lane_axis(slots, rows)
    height = axis | {"field": "y"}
    lane: Spec = {"x": start, "x2": {"field": "to"}, "y": axis, "tooltip": told}
    live: Json = {"filter": {"field": "stage", "oneOf": list(LIVE)}}
    gone: Json = {
        "calculate": f"indexof({list(GONE)!r}, datum.stage) >= 0 ? 'embargoed' : datum.stage",
        "as": "stage",
    }
    legend: Spec = {"symbolType": "square", "columns": {"expr": "width < 420 ? 3 : 6"}}
    scale: Spec = {"domain": list(STAGES), "range": list(STAGE_INKS)}
    strip: Spec = {"field": "stage", "type": "nominal", "scale": scale, "legend": legend}
    silent: Spec = {"type": "rect", "aria": False}
    return [
        _lane(
            {"type": "rect", "opacity": 0.17},
            "full",
            live,
            **lane,
            color=by_colour("blueprint", blueprints),
            description={"field": "told"},
        ),
        _lane(silent, "top", live, **lane, color=by_colour("blueprint", blueprints)),
        _lane(silent, "foot", gone, **lane, fill=strip),
        layer(
            "accuracies",
            {**line_mark(1.3), "color": MUTED},
            x=TIME,
            y=height,
            detail={"field": "host"},
            tooltip=described(HOST, STEP, ACCURACY),
        ),
        layer("hostnames", NAME, x={"datum": 0}, y=height, text={"field": "words"}),
        _marks(height),
    ]


def _lane(mark: Spec, top: str, kept: Json, **encoding: Json) -> Spec:
    """Rectangles from the foot of each lane to `top`, of alpha or of the whole lane; or the strip
    below the foot.
    """
    heights: list[Json] = [
        {"calculate": f"datum.base + {FOOT} + {FULL} * datum.alpha", "as": "top"},
        {"calculate": f"datum.base + {FOOT} + {FULL}", "as": "full"},
        {"calculate": f"datum.base + {FOOT}", "as": "foot"},
        {"calculate": TOLD, "as": "told"},
    ]
    return layer("lanes", mark, **encoding, y2={"field": top}) | {"transform": [*heights, kept]}


def _marks(height: Spec) -> Spec:
    """What happened, as a mark in its lane."""
    scale: Spec = {"domain": list(MARKS), "range": list(MARKS.values())}
    shape: Spec = {"field": "event", "type": "nominal", "legend": None, "scale": scale}
    mark: Spec = {
        "type": "point",
        "filled": True,
        "size": 60,
        "color": INK,
        "stroke": "var(--card)",
    }
    told = described(EVENT, CAUSE, BLUEPRINT, HOST, SLOT, STEP)
    return layer("marks", {**mark, "strokeWidth": 1}, x=TIME, y=height, shape=shape, tooltip=told)


def _lane_axis(slots: Sequence[str], rows: int) -> Spec:
    """Heights from the first host's name downwards; each slot's name stands beside its lane."""
    block = len(slots) + HEAD
    middles: list[Json] = [-(row + 0.55) for row in range(rows) if row % block >= HEAD]
    name = f"{list(slots)!r}[round(-datum.value - 0.55) % {block} - {HEAD}]"
    axis: Spec = {
        "values": middles,
        "labelExpr": name,
        "grid": False,
        "title": None,
        "labelOverlap": False,
    }
    axis |= {"labelFontSize": 9.5, "tickCount": rows}
    scale: Spec = {"domain": [-rows, 0.0], "nice": False}
    return {"field": "base", "type": "quantitative", "axis": axis, "scale": scale}


def blueprints_figure(shown: Mapping[str, Table], choices: Sequence[Choice]) -> Figure | None:
    """The scoreboard: seeds by fate, a bar each, beside the numbers."""
    names = distinct(shown["blueprints"], "blueprint")
    if not names:
        return None
    labels: Spec = {"labelColor": INK, "labelLimit": 120}
    y: Spec = {"field": "blueprint", "type": "nominal", "title": None, "sort": "-x", "axis": labels}
    x: Spec = {
        "field": "seeds",
        "type": "quantitative",
        "title": "seeds",
        "axis": {"tickMinStep": 1, "grid": True},
    }
    told = described(BLUEPRINT, Axis("fate", "fate", ""), Axis("seeds", "seeds", "d"))
    bars = layer(
        "blueprints",
        {"type": "bar", "cornerRadiusEnd": 2},
        x=x,
        y=y,
        tooltip=told,
        yOffset={"field": "fate", "sort": list(FATES)},
        color=by_colour("fate", FATES),
    )
    bars["transform"] = [{"fold": list(FATES), "as": ["fate", "seeds"]}]
    listed = columns(
        "run",
        "blueprint",
        "germinated",
        ("fossilized", "fossilised"),
        "pruned",
        ("kept", "fossilised of those that ended (%)", 0),
        ("gain", "gain to fossilising (percent points)", 2),
        ("contribution", "contribution when fossilised (percent points)", 2),
        ("churn", "gain to pruning (percent points)", 2),
    )
    spec = chart(
        "Seeds of every blueprint by what became of them", [bars], height=60 + 46 * len(names)
    )
    caption = "Seeds of all rounds; the table has what they gained and contributed."
    return Figure(
        "blueprints",
        "Blueprint scoreboard",
        caption,
        spec,
        "blueprints",
        listed,
        ["blueprints"],
        choices,
    )


def credit_figure(
    shown: Mapping[str, Table], field: str, title: str, caption: str, choices: Sequence[Choice]
) -> Figure | None:
    """What the seeds of every slot were worth over the env-steps of a round, mean over hosts.

    None where nothing was measured, or nothing but 0: a seed that is alone has nobody to help.
    """
    table = shown["credit"]
    if not any(table.get(field, [])):
        return None
    value = Axis(field, f"{title} (percent points)", "+.3f")
    place: Spec = {"x": across(STEP, whole=True), "y": upwards(value, zero=True)}
    place["color"] = by_colour("slot", distinct(table, "slot"))
    told = described(SLOT, STEP, value, Axis("hosts", "hosts measured", "d"))
    nothing: Spec = {"type": "rule", "strokeDash": [3, 3], "aria": False}
    spec = chart(
        f"{title} of every slot over env-steps",
        [
            layer("credit", nothing, y={"datum": 0}),
            layer("credit", line_mark(1.8), **place),
            layer("credit", point_mark(12), **place, tooltip=told),
        ],
    )
    listed = columns(
        "run",
        "round",
        ("step", "env-step"),
        "slot",
        ("hosts", "hosts measured"),
        (field, value.title, 4),
    )
    rounds = [*choices, Choice("round", "Round", "credit")]
    return Figure(f"credit-{field}", title, caption, spec, "credit", listed, ["credit"], rounds)
