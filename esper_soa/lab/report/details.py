"""Words and tables of a report: comparisons, settings, versions, findings. Needs no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import combinations
from statistics import fmean

from esper_soa.config.settings import flat_settings
from esper_soa.lab.report.effects import (
    FLOOR_SHARE,
    WORTHS,
    Numbers,
    by_name,
    chosen,
    effects_of,
    finite,
    floor_of,
    rank_correlation,
)
from esper_soa.lab.report.groups import CONFIDENCE, RunGroup, differing, pairs, study_of
from esper_soa.lab.report.run_files import Record, RunRecord, Table, listed, number
from esper_soa.lab.report.text import UNKNOWN_NUMBER, format_number, p_value
from esper_soa.lab.run_folders import MEASURES
from esper_soa.training.results.statistics import Interval, estimate, source_words

MAX_COLUMNS = 12  # runs side by side in the table of differing settings
# Columns of the table `rounds` that describe an update, with their titles.
UPDATE_COLUMNS = {
    "reward": "reward of an episode",
    "explained_variance": "explained variance of the critic (1 is all, 0 or less nothing)",
    "kl": "divergence from the policy before (nats)",
}
CRITIC_ROUNDS = 3  # updates over which the critic is judged
PAIR_COLUMNS = "group|other|random seeds|difference (points)|over|p"
STUDY_PAIRS = "budget (GFLOP)|group|over|lead|p|p after Holm"
STUDY_DIFFERENCE = "difference (points)|random seeds won|effect|p|p after Holm"


def details(runs: Sequence[RunRecord]) -> str:
    """The section that tells what the runs were: settings, machine, findings."""
    first = runs[0]
    label = f" of run {first.label}" if len(runs) > 1 else ""
    settings = _table("setting|value", ((name, str(v)) for name, v in first.settings.items()))
    if settings:
        count = f"{len(first.settings)} settings"
        settings = f"<details><summary>{count}</summary>{settings}</details>"
    overrides = ((run.label, " ".join(run.overrides)) for run in runs if run.overrides)
    versions = [
        (run.label, name, str(value))
        for run in runs
        for name, value in flat_settings(run.versions).items()
        if value not in (None, "", [])
    ]
    cards = [
        _card("What the updates showed", _anomalies(runs)),
        _card("Settings that differ", _differing(runs)),
        _card("Overrides", _table("run|overrides", overrides)),
        _card("Software and machine", _shared("fact|value|runs", versions, len(runs))),
        _card(f"All settings{label}", settings),
    ]
    return (
        '<section id="settings" aria-labelledby="settings-title"><h2 id="settings-title">What was '
        "the run?</h2><p>What was asked for, what it ran on, and what was noticed.</p>"
        f'<div class="figures">{"".join(cards)}</div></section>\n'
    )


def comparisons(groups: Sequence[RunGroup]) -> str:
    """Every pair of groups with its test, or what esper-compare found; empty of one group."""
    study = study_of(groups)
    return _card("Comparisons", _study(study) if study else _pairs(groups))


def updates(runs: Sequence[RunRecord], tables: Mapping[str, Table]) -> str:
    """The updates of runs of one round; the numbers of several rounds are figures, and here is said
    where the critic explains nothing.
    """
    rounds = tables["rounds"]
    if len({*rounds.get("round", [])}) > 1:
        blind = [(run.label, f"{value:.3g}") for run in runs if (value := _explained(run)) <= 0]
        words = (
            f"Explained variance, mean of the last {CRITIC_ROUNDS} updates: at 0 or below the "
            "critic foresees returns no better than their mean, and the policy learns from noisy "
            "returns. Raise policy.ppo.value_coef, or collect more envs per round."
        )
        table = _table("run|explained variance", blind)
        return _card("Warning: the critic explains nothing", table and _about(words) + table)
    rows = zip(*(rounds.get(name, []) for name in ("run", *UPDATE_COLUMNS)), strict=True)
    digits = "{:,.4g}".format
    texts = ([str(run), *(format_number(cell, digits) for cell in row)] for run, *row in rows)
    return _card("The policy update", _table("|".join(["run", *UPDATE_COLUMNS.values()]), texts))


def measured_effects(runs: Sequence[RunRecord]) -> str:
    """Mean effects of the actions that were measured, each beside the floor of such a mean, and
    rank correlations with what their seeds were said to be worth.
    """
    rows = []
    pairs = []
    for run in runs:
        found = effects_of(run.path)
        last = chosen(found, False)
        placebos = finite(chosen(found, True).get("accuracy", ()))
        for op, of_op in by_name(last, "op").items():
            parts = {"all": of_op} | by_name(of_op, "blueprint")
            for name, part in parts.items():
                rows.append([run.label, op, name, *_effect_cells(part["accuracy"], placebos)])
        for name, other in combinations(("accuracy", *WORTHS), 2) if last else ():
            value, count = rank_correlation(last[name], last[other])
            if not math.isnan(value):
                words = f"{name} and {other}".replace("accuracy", "effect")
                pairs.append([run.label, words, f"{value:+.2f}", str(count)])
    words = (
        "Points of validation accuracy at the last horizon: a host less its twin, which did "
        f"without the action, with t intervals of {CONFIDENCE:.0%}. The floor is the bound that "
        f"{FLOOR_SHARE:.0%} of means of as many placebos keep, whose twins differ by one weight, "
        "moved by a part in a million."
    )
    table = _table("run|action|blueprint|measured|effect (points)|floor|", rows)
    ranks = _table("run|rank correlation of|Spearman's rho|seeds", pairs)
    return _card("What actions brought", table and _about(words) + table + ranks)


def _effect_cells(effects: Numbers, placebos: Numbers) -> list[str]:
    values = finite(effects)
    interval = estimate(values.tolist(), CONFIDENCE).interval
    floor = floor_of(placebos, max(1, len(values)))
    known = "no placebo" if math.isnan(floor) else f"{floor:.2f}, of {len(placebos)} placebos"
    below = "below the floor" if abs(interval.mean) <= floor else ""
    return [str(len(values)), interval.text(), known, below]


def _explained(run: RunRecord) -> float:
    """The mean explained variance of the last updates; NaN where there are fewer."""
    parts = (number(line, "update", "explained_variance") for line in run.rounds[-CRITIC_ROUNDS:])
    known = [value for value in parts if value is not None]
    return fmean(known) if len(known) == CRITIC_ROUNDS else math.nan


def _card(title: str, content: str) -> str:
    return f'<div class="card wide"><h3>{escape(title)}</h3>{content}</div>\n' if content else ""


def _about(words: str) -> str:
    return f'<p class="about">{escape(words)}</p>'


def _table(titles: str, rows: Iterable[Sequence[str]]) -> str:
    """Texts in a table that scrolls, `titles` with | between them; empty without rows."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    named = escape(titles).split("|")
    head = "".join(f'<th scope="col">{title}</th>' for title in named)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {", ".join(named)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _pairs(groups: Sequence[RunGroup]) -> str:
    compared = pairs(groups)
    if not compared:
        return ""
    rows = []
    for pair in compared:
        found = pair.found
        source = source_words("random seeds", found.sampled and "samples")
        cells = [pair.label, pair.other, str(pair.seeds), found.interval.text(), source]
        rows.append((*cells, p_value(found.p), p_value(pair.adjusted)))
    words = (
        "Differences are paired by random seed, over two or more with which both groups ended. "
        f"Intervals of {CONFIDENCE:.0%} and p are of the same t test; in the last column p is "
        f"corrected after Holm for the number of comparisons, {len(compared)}."
    )
    return _about(words) + _table(f"{PAIR_COLUMNS}|p of {len(compared)} together", rows)


def _study(study: Record) -> str:
    if budgets := listed(study, "budgets"):
        return _budgets(study, budgets)
    rows = [row for row in listed(study, "comparisons") if isinstance(row, dict)]
    powers = (
        f" {row['group']}, {_measure(row)}: {row['power']}." for row in rows if row.get("power")
    )
    words = (
        f"By esper-compare, over {len(listed(study, 'random_seeds'))} random seeds that every "
        "group has played: differences paired by random seed, intervals of "
        f"{number(study, 'confidence') or 0:.0%}, p of {study.get('test') or 'signed rank tests'}, "
        f"corrected after Holm for {len(rows)} comparisons. The effect is the "
        f"mean difference over its standard deviation, by Hedges.{''.join(powers)}"
    )
    return _about(words) + _table(
        f"group|against|measure|{STUDY_DIFFERENCE}|verdict", map(_study_row, rows)
    )


def _budgets(study: Record, budgets: Sequence[Record]) -> str:
    """Sentences and pairs of a study that has them for each budget, or tuned values at none."""
    words = (
        f"By esper-compare. Pairs are by random seed; intervals of "
        f"{number(study, 'confidence') or 0:.0%} and p are of the same t test, p after Holm is for "
        "all pairs at a budget. A lead is in percent points, of test losses in nats."
    )
    sentences = "".join(_about(str(budget.get("sentence", ""))) for budget in budgets)
    rows = [_pair_row(budget, pair) for budget in budgets for pair in listed(budget, "pairs")]
    return sentences + _about(words) + _table(STUDY_PAIRS, rows)


def _pair_row(budget: Record, pair: Record) -> tuple[str, ...]:
    bounds = [number(pair, name) for name in Interval._fields]
    lead = Interval(*(math.nan if bound is None else bound for bound in bounds))
    return (
        format_number(number(budget, "gflop"), "{:,.4g}".format),
        str(pair.get("group", "")),
        str(pair.get("other", "")),
        lead.text("+z.3f"),
        p_value(number(pair, "p") or 0.0),
        p_value(number(pair, "corrected") or 0.0),
    )


def _study_row(row: Record) -> tuple[str, ...]:
    bounds = [number(row, name) for name in Interval._fields]
    difference = Interval(*(math.nan if bound is None else bound for bound in bounds))
    wins = format_number(number(row, "won"), "{:.0f}".format)
    return (
        str(row.get("group", "")),
        str(row.get("reference", "")),
        _measure(row),
        UNKNOWN_NUMBER if bounds[0] is None else difference.text(),
        f"{wins} of {len(listed(row, 'differences'))}",
        format_number(number(row, "effect"), "{:+.2f}".format),
        p_value(number(row, "p") or 0.0),
        p_value(number(row, "corrected") or 0.0),
        str(row.get("verdict", "")),
    )


def _measure(row: Record) -> str:
    return MEASURES.get(str(row.get("measure")), str(row.get("measure")))


def _differing(runs: Sequence[RunRecord]) -> str:
    columns = runs[:MAX_COLUMNS]
    labels = "|".join(run.label.replace("|", " ") for run in columns)
    rows = ([name, *values] for name, values in differing(columns).items())
    table = _table(f"setting|{labels}", rows)
    left_out = len(runs) - len(columns)
    return table + (_about(f"{left_out} more runs are not shown here.") if left_out else "")


def _anomalies(runs: Sequence[RunRecord]) -> str:
    rows = []
    for run in runs:
        rounds: dict[str, list[str]] = {}
        for line in run.rounds:
            for name in listed(line, "anomalies"):
                rounds.setdefault(str(name), []).append(str(line.get("round")))
        rows += [(run.label, name, ", ".join(where)) for name, where in rounds.items()]
    table = _shared("finding|in rounds|runs", rows, len(runs))
    return table and _about("The log of a run says what each means and what to do.") + table


def _shared(titles: str, findings: Iterable[tuple[str, str, str]], total: int) -> str:
    """A row per name and value with the labels that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for label, name, value in findings:
        rows.setdefault((name, value), []).append(label)
    shared = [
        (name, value, "all" if len(labels) == total else ", ".join(labels))
        for (name, value), labels in sorted(rows.items(), key=lambda row: row[0][0])
    ]
    return _table(titles, shared)
