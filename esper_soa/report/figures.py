"""The figures of a report, by section: what each shows, how it is to be read, and the table behind
it.

Given groups of runs by page.py; a figure that would have nothing to show is left out. Needs no
torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from esper_soa.report.charts import (
    GROUP,
    HOST,
    ROUND,
    RUN,
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
from esper_soa.report.groups import Group
from esper_soa.report.run_tables import Table


class Column(NamedTuple):
    """A column of the table behind a figure."""

    field: str
    title: str  # with its unit
    digits: int | None = None  # behind the point; None: as it is


# Field, title, digits, as far as they are given.
Listed: TypeAlias = str | tuple[str, str] | tuple[str, str, int]


class Choice(NamedTuple):
    """A field of which the reader chooses one value, in every table of the figure that has it."""

    field: str
    label: str
    table: str  # that knows the values
    first: str = ""  # chosen when the page opens; "" = the first one


class Figure(NamedTuple):
    """A chart with its words and the table behind it."""

    id: str
    title: str
    caption: str
    spec: Spec
    table: str  # opened beside it
    columns: Sequence[Column]
    data: Sequence[str]  # tables that it draws from
    choices: Sequence[Choice] = ()
    wide: bool = False


class Section(NamedTuple):
    """Figures that answer one question."""

    id: str
    title: str
    words: str
    figures: Sequence[Figure]


class Shown(NamedTuple):
    """Everything that is drawn, and the tables that it is drawn from."""

    sections: list[Section]
    tables: dict[str, Table]


class Curve(NamedTuple):
    """A number of every round."""

    field: str
    title: str
    unit: str
    caption: str
    form: str = ",.4~g"
    spread: bool = False  # whether the table has its lowest and highest host

    @property
    def axis(self) -> Axis:
        return Axis(
            self.field, f"{self.title} ({self.unit})" if self.unit else self.title, self.form
        )


CURVES = (
    Curve(
        "accuracy",
        "Validation accuracy",
        "%",
        "At the last env-step of every round.",
        ",.2f",
        spread=True,
    ),
    Curve(
        "reward",
        "Reward of an episode",
        "",
        "Sum over its env-steps, before any scaling.",
        ",.2f",
        spread=True,
    ),
    Curve(
        "parameters",
        "Parameters",
        "per host",
        "Trainable ones of host and live seeds, mean over hosts.",
        ",.0f",
    ),
    Curve(
        "val_loss",
        "Validation loss",
        "nats",
        "At the last env-step of every round, mean over hosts.",
        ",.4f",
    ),
)
HEALTH = (
    Curve(
        "explained_variance",
        "Explained variance",
        "",
        "Of the returns, by the critic: 1 is perfect, 0 no better than their mean.",
    ),
    Curve(
        "kl",
        "Divergence of an update",
        "nats",
        "How far an update has moved the policy, approximately.",
    ),
)
SPEED = Curve(
    "eps",
    "Speed",
    "env-steps/s",
    "Env-steps of all hosts per second, the policy update included.",
    ",.1f",
)


def curves_section(groups: Sequence[Group]) -> Section:
    """Everything over rounds, with every seed shown."""
    words = (
        "Every thin line is a run; the thick line is the mean over the runs of a group."
        if several(groups)
        else "Points are means over hosts; the band goes from the lowest host to the highest."
    )
    return Section("learning", "Learning", words, [curve(groups, one) for one in CURVES])


def several(groups: Sequence[Group]) -> bool:
    """Whether there is more than one run."""
    return sum(len(group.runs) for group in groups) > 1


def curve(groups: Sequence[Group], one: Curve) -> Figure:
    """A number over rounds: of one run with the spread of its hosts, of several each run and the
    groups' means.
    """
    spread = one.spread and not several(groups)
    layers = _runs(groups, one) if several(groups) else _run(groups, one)
    given: list[Listed] = ["run", "round", (one.field, one.axis.title, 4)]
    given += (
        [(f"{one.field}_min", "lowest host", 4), (f"{one.field}_max", "highest host", 4)]
        if spread
        else []
    )
    spec = chart(f"{one.axis.title} over rounds", layers)
    data = ["rounds", "means"] if several(groups) else ["rounds"]
    return Figure(
        f"curve-{one.field}", one.title, one.caption, spec, "rounds", columns(*given), data
    )


def _runs(groups: Sequence[Group], one: Curve) -> list[Spec]:
    """A thin line per run, a thick one per group."""
    x = across(ROUND, whole=True)
    y = upwards(one.axis)
    color = by_colour("group", [group.label for group in groups], legend=len(groups) > 1)
    each = described(RUN, ROUND, one.axis)
    mean = described(GROUP, ROUND, one.axis, Axis("runs", "runs", "d"))
    thin = line_mark(1.2, 0.38)
    return [
        layer("rounds", thin, x=x, y=y, color=color, detail={"field": "run"}, tooltip=each),
        layer("means", line_mark(2.8), x=x, y=y, color=color),
        layer("means", point_mark(), x=x, y=y, color=color, tooltip=mean),
    ]


def _run(groups: Sequence[Group], one: Curve) -> list[Spec]:
    """A line with the hosts' band around it."""
    x = across(ROUND, whole=True)
    y = upwards(one.axis)
    color = by_colour("group", [group.label for group in groups], legend=False)
    low, high = (Axis(f"{one.field}_{end}", one.axis.title, one.form) for end in ("min", "max"))
    band: Spec = {"type": "area", "opacity": 0.16, "aria": False}
    told = described(ROUND, one.axis)
    if one.spread:
        told += described(low._replace(title="lowest host"), high._replace(title="highest host"))
    return [
        *(
            [layer("rounds", band, x=x, y=upwards(low), y2={"field": high.field}, color=color)]
            if one.spread
            else []
        ),
        layer("rounds", line_mark(), x=x, y=y, color=color),
        layer("rounds", point_mark(), x=x, y=y, color=color, tooltip=told),
    ]


def cost_section(groups: Sequence[Group]) -> Section:
    """Accuracy against what it costs."""
    size = Axis("parameters", "parameters of the host", ",.0f")
    flop = Axis("train_gflop", "training of an episode (GFLOP)", ",.4~g")
    words = (
        "Up and to the left is better. Faint points are the means of all rounds, each run's "
        "joined in their order"
    )
    if any(run.finished for group in groups for run in group.runs):
        words += (
            "; filled ones are single hosts of the last rounds, rings the same hosts as the "
            "control played them"
        )
    words += "."
    figures = [
        _cost(groups, "cost-parameters", "Accuracy against parameters", size),
        _cost(groups, "cost-flop", "Accuracy against training FLOP", flop),
    ]
    return Section("cost", "What it costs", words, figures)


def _cost(groups: Sequence[Group], name: str, title: str, cost: Axis) -> Figure:
    accuracy = Axis("accuracy", "validation accuracy (%)", ",.2f")
    x = across(cost)
    y = upwards(accuracy)
    color = by_colour("group", [group.label for group in groups], legend=len(groups) > 1)
    filled: Spec = {"condition": {"test": "datum.hosts == 'grown'", "value": 0.85}, "value": 0}
    host: Spec = {"type": "point", "filled": True, "size": 48, "strokeWidth": 1.5}
    told = described(Axis("hosts", "hosts", ""), RUN, HOST, accuracy, cost)
    way: Spec = {"x": x, "y": y, "color": color, "detail": {"field": "run"}}
    layers = [
        layer("rounds", line_mark(1, 0.25), **way, order={"field": "round"}),
        layer("rounds", point_mark(14, 0.35), **way, tooltip=described(RUN, ROUND, accuracy, cost)),
    ]
    if any(run.finished for group in groups for run in group.runs):
        layers.append(
            layer(
                "hosts", host, x=x, y=y, color=color, fillOpacity=filled, stroke=color, tooltip=told
            )
        )
    shown = columns(
        "run", "hosts", "host", ("accuracy", accuracy.title, 2), (cost.field, cost.title, 1)
    )
    caption = "Hosts at the end of the rounds compared, and the way there."
    spec = chart(f"{title}, a point per host", layers, height=260)
    return Figure(name, title, caption, spec, "hosts", shown, ["rounds", "hosts"])


def columns(*given: Listed) -> list[Column]:
    """Columns by their fields, with titles and digits where they are given."""
    return [Column(one, one) if isinstance(one, str) else Column(*one) for one in given]


class Parts(NamedTuple):
    """A number of every round, told apart by a field."""

    data: str  # the table, which the figure is named after
    title: str
    caption: str
    field: str
    value: Axis
    draw: Callable[[str, str, Axis, str, Sequence[str]], Spec]  # charts.stacked or charts.lines


def parts_figure(
    shown: Mapping[str, Table], parts: Parts, choices: Sequence[Choice]
) -> Figure | None:
    """Bars or lines over rounds, one for each name in the field; None where the table is empty."""
    name, title, caption, field, value, draw = parts
    names = distinct(shown[name], field)
    if not names:
        return None
    spec = draw(f"{title} over rounds", name, value, field, names)
    listed = columns("run", "round", field, (value.field, value.title, 4))
    return Figure(name, title, caption, spec, name, listed, [name], choices)


def distinct(table: Table, field: str) -> list[str]:
    """The names in a column, in the order in which they come."""
    return [str(name) for name in dict.fromkeys(table.get(field, []))]


def kept(figures: Iterable[Figure | None]) -> list[Figure]:
    """Those that there are."""
    return [figure for figure in figures if figure is not None]
