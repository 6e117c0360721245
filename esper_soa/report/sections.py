"""Which sections a report has, in their order, and the tables that their figures draw from.

Given groups of runs by page.py. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from esper_soa.report import lanes, run_tables
from esper_soa.report.charts import (
    ACCURACY,
    CAUSE,
    EVENT,
    GROUP,
    HOST,
    INK,
    ROUND,
    RUN,
    STEP,
    Axis,
    Spec,
    across,
    by_colour,
    chart,
    described,
    layer,
    lines,
    stacked,
    upwards,
)
from esper_soa.report.figures import (
    CURVES,
    HEALTH,
    SPEED,
    Choice,
    Figure,
    Parts,
    Section,
    Shown,
    columns,
    cost_section,
    curve,
    curves_section,
    distinct,
    kept,
    parts_figure,
    several,
)
from esper_soa.report.figures_seeds import blueprints_figure, credit_figure, lanes_figure
from esper_soa.report.groups import Group
from esper_soa.report.run_tables import Table
from esper_soa.report.standings import Standing, accuracy_of, gain_of, standings

NOTHING_RECORDED = " Env-steps were not recorded in these runs (telemetry.level)."
# Figures of what the seeds of a slot were worth: column, title, caption.
CREDIT = (
    (
        "contribution",
        "Contribution",
        "Accuracy lost without the seed of a slot, mean over the hosts it was measured in.",
    ),
    ("shapley", "Shapley value", "A slot's share of what all seeds add together, mean over hosts."),
    (
        "interaction",
        "Interaction",
        "What a seed adds to the others beyond its own part: above 0 they help each other.",
    ),
)
SHAPLEY = Parts(
    "shapley",
    "Shapley value at the end",
    "At the last env-step of an episode, mean over hosts.",
    "slot",
    Axis("value", "Shapley value (percent points)", "+.3f"),
    lines,
)
OPS = Parts(
    "ops",
    "Decisions",
    "Share of all decisions of a round, by what was carried out.",
    "op",
    Axis("share", "share of decisions (%)", ".2f"),
    stacked,
)
TERMS = Parts(
    "terms",
    "Reward terms",
    "Each term summed over an episode, mean over hosts; terms that stayed 0 are left out.",
    "term",
    Axis("value", "reward of an episode", "+.3f"),
    stacked,
)
ENTROPY = Parts(
    "entropy",
    "Entropy",
    "Of every action head, as a share of the highest possible: 1 is chance, 0 is settled.",
    "head",
    Axis("value", "entropy (share of the highest)", ".4f"),
    lines,
)
ROLLBACKS = Parts(
    "rollbacks",
    "Rollbacks",
    "Hosts put back to a snapshot, by the reason.",
    "reason",
    Axis("value", "rollbacks", "d"),
    stacked,
)
PHASES = Parts(
    "phases",
    "Time by phase",
    "As profile=phases told it in the log.",
    "phase",
    Axis("value", "seconds", ",.3f"),
    stacked,
)
TIMES = Parts(
    "times",
    "Time of a round",
    "Collecting env-steps, and the policy update after them.",
    "phase",
    Axis("value", "seconds", ",.2f"),
    stacked,
)


def shown_of(groups: Sequence[Group]) -> Shown:
    """Everything that a report draws."""
    found = tables_of(groups)
    choices = [Choice("run", "Run", "rounds")]
    sections = [
        *([comparison_section(groups)] if several(groups) else []),
        curves_section(groups),
        cost_section(groups),
        seeds_section(groups, found, choices),
        policy_section(groups, found, choices),
        governor_section(found, choices),
        time_section(groups, found, choices),
    ]
    return Shown(sections, found)


def tables_of(groups: Sequence[Group]) -> dict[str, Table]:
    """Every table by its name."""
    runs = list(chain.from_iterable(group.runs for group in groups))
    rounds = lanes.chosen_rounds(runs)
    return {
        "standings": standings_table(standings(groups)),
        "finals": finals_table(groups),
        "rounds": run_tables.rounds_table(groups),
        "means": run_tables.means_table(groups, [one.field for one in (*CURVES, *HEALTH, SPEED)]),
        "hosts": run_tables.hosts_table(groups),
        "lanes": lanes.lanes_table(rounds),
        "accuracies": lanes.accuracies_table(rounds),
        "hostnames": lanes.names_table(rounds),
        "marks": lanes.marks_table(rounds),
        "credit": lanes.credit_table(rounds),
        "blueprints": run_tables.blueprints_table(groups),
        "shapley": run_tables.shapley_table(groups),
        "ops": run_tables.ops_table(groups),
        "entropy": run_tables.prefixed_table(groups, "head", "entropy/"),
        "terms": run_tables.without_zeros(
            run_tables.parts_table(groups, "term", "reward_terms"), "term"
        ),
        "rollbacks": run_tables.without_zeros(run_tables.rollbacks_table(groups), "reason"),
        "governor": lanes.governor_table(runs),
        "times": run_tables.times_table(groups),
        "phases": run_tables.phases_table(groups),
    }


def standings_table(found: Sequence[Standing]) -> Table:
    """A row per group, the best first; a bound that is not finite is left out."""
    rows: list[run_tables.Row] = []
    for one in found:
        row: run_tables.Row = {"group": one.label, "runs": one.runs, "left_out": one.left_out}
        for name, interval in (("accuracy", one.accuracy), ("iqm", one.iqm), ("gain", one.gain)):
            ends = (None, None, None) if interval is None else interval
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(_finite, ends), strict=True))
        flop = None if one.train_flop is None else one.train_flop / run_tables.GIGA
        rows.append(row | {"parameters": one.parameters, "train_gflop": flop})
    return run_tables.table_of(rows)


def finals_table(groups: Sequence[Group]) -> Table:
    """A row per run that has come to its end: the mean accuracy of its hosts, and what it is ahead
    of its control.
    """
    return run_tables.table_of(
        {"group": group.label, "run": run.label, "accuracy": accuracy, "gain": gain_of(run)}
        for group in groups
        for run in group.runs
        for accuracy in [accuracy_of(run)]
        if accuracy is not None
    )


def _finite(bound: float | None) -> float | None:
    return None if bound is None or abs(bound) == float("inf") else bound


def comparison_section(groups: Sequence[Group]) -> Section:
    """Groups beside each other; the tests stand in the page as a table."""
    if not standings(groups):
        return Section(
            "comparison",
            "Comparison",
            "No run has come to its end: there is nothing to compare yet.",
            [],
        )
    names = [group.label for group in groups]
    accuracy = Axis("accuracy", "final accuracy (%)", ",.2f")
    labels: Spec = {"labelColor": INK, "labelLimit": 220}
    y: Spec = {"field": "group", "type": "nominal", "title": None, "sort": None, "axis": labels}
    x = across(accuracy)
    color = by_colour("group", names, legend=False)
    low = Axis("accuracy_low", "from", ",.2f")
    high = Axis("accuracy_high", "to", ",.2f")
    told = described(GROUP, accuracy, low, high, Axis("runs", "runs", "d"))
    reach: Spec = {"type": "rule", "strokeWidth": 3, "opacity": 0.5, "aria": False}
    dot: Spec = {"type": "point", "filled": True, "size": 90}
    each: Spec = {"type": "tick", "thickness": 1.5, "bandSize": 16, "opacity": 0.7}
    one = described(RUN, GROUP, accuracy, Axis("gain", "over the control (points)", "+.2f"))
    layers = [
        layer("finals", each, x=x, y=y, color=color, tooltip=one),
        layer(
            "standings",
            reach,
            x={**x, "field": low.field},
            x2={"field": high.field},
            y=y,
            color=color,
        ),
        layer("standings", dot, x=x, y=y, color=color, tooltip=told),
    ]
    listed = columns(
        "group",
        "runs",
        ("left_out", "unfinished"),
        ("accuracy", "accuracy (%)", 2),
        ("accuracy_low", "from", 2),
        ("accuracy_high", "to", 2),
        ("iqm", "interquartile mean (%)", 2),
        ("iqm_low", "from", 2),
        ("iqm_high", "to", 2),
        ("gain", "over the control (points)", 2),
        ("gain_low", "from", 2),
        ("gain_high", "to", 2),
        ("parameters", "parameters", 0),
        ("train_gflop", "training GFLOP", 1),
    )
    spec = chart("Final accuracy of every group", layers, height=40 + 34 * len(names))
    title = "Final accuracy by group"
    caption = "Every run, and the mean over the runs of a group with its 95 % t interval."
    figure = Figure(
        "standings", title, caption, spec, "standings", listed, ["standings", "finals"], wide=True
    )
    words = "A run counts once, by the mean accuracy of its hosts at the end."
    words += " Every pair is tested under Settings." if len(groups) > 1 else ""
    return Section("comparison", "Comparison", words, [figure])


def seeds_section(
    groups: Sequence[Group], found: Mapping[str, Table], choices: Sequence[Choice]
) -> Section:
    """Lives of seeds, blueprints, credit."""
    slots = max((run.slots for group in groups for run in group.runs), key=len, default=[])
    figures = kept(
        [
            lanes_figure(found, slots, choices),
            blueprints_figure(found, choices),
            parts_figure(found, SHAPLEY, choices),
            *(credit_figure(found, *words, choices) for words in CREDIT),
        ]
    )
    words = "Where seeds germinated, what they became, and what they were worth."
    return Section("seeds", "Seeds", words + ("" if found["lanes"] else NOTHING_RECORDED), figures)


def policy_section(
    groups: Sequence[Group], found: Mapping[str, Table], choices: Sequence[Choice]
) -> Section:
    """What the policy did, how sure it was, and what it was paid for."""
    figures = kept(
        [
            *(parts_figure(found, parts, choices) for parts in (OPS, TERMS, ENTROPY)),
            *(curve(groups, one) for one in HEALTH if any(found["rounds"].get(one.field, []))),
        ]
    )
    return Section(
        "policy",
        "Policy",
        "What was decided, how sure the policy was, and what it was paid for.",
        figures,
    )


def governor_section(found: Mapping[str, Table], choices: Sequence[Choice]) -> Section:
    """Hosts that were put back to a snapshot, and what led there."""
    figures = kept([parts_figure(found, ROLLBACKS, choices), _governor_figure(found, choices)])
    quiet = "The governor had nothing to do: no host was put back to a snapshot."
    return Section(
        "governor", "Governor", "Hosts that lost their way." if figures else quiet, figures
    )


def _governor_figure(found: Mapping[str, Table], choices: Sequence[Choice]) -> Figure | None:
    if not found["governor"]:
        return None
    told = described(EVENT, CAUSE, ROUND, STEP, HOST, ACCURACY)
    mark: Spec = {"type": "point", "filled": True, "size": 45, "opacity": 0.8}
    color = by_colour("event", distinct(found["governor"], "event"))
    x = across(ROUND, whole=True)
    y = upwards(STEP, zero=True)
    points = layer("governor", mark, color=color, x=x, y=y, tooltip=told)
    listed = columns(
        "run",
        "round",
        ("step", "env-step"),
        "host",
        "event",
        "cause",
        ("accuracy", "accuracy (%)", 2),
    )
    title = "Events of the governor"
    caption = "Divergence noticed, panics and rollbacks."
    spec = chart("Events of the governor by round and env-step", [points])
    return Figure(
        "governor-events", title, caption, spec, "governor", listed, ["governor"], choices
    )


def time_section(
    groups: Sequence[Group], found: Mapping[str, Table], choices: Sequence[Choice]
) -> Section:
    """Where the time went."""
    bars, phases = (parts_figure(found, parts, choices) for parts in (TIMES, PHASES))
    speed = [curve(groups, SPEED)] if any(found["rounds"].get("eps", [])) else []
    return Section("time", "Time", "How long the rounds took.", kept([bars, *speed, phases]))
