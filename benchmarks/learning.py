"""Did policies of some seeds learn? Records of policies that were trained and then played beside
scripted ones on fresh hosts, judged over seeds.

A seed is trained by `esper-train` and played by `esper-evaluate`; the committed records hold what
these gave for six seeds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.intervals import iqm_interval
from benchmarks.rank_tests import mann_whitney
from benchmarks.records import CONFIDENCE, Line, Records, bounds, markdown
from esper_soa.training.results.statistics import Interval

POLICIES = ("ppo", "heuristic", "random", "wait")


class Row(NamedTuple):
    """A policy over all seeds."""

    policy: str
    net: Interval  # interquartile mean of accuracy minus rent
    accuracy: float  # interquartile mean
    wins: int  # seeds with which the learned policy is ahead of it
    p: float | None  # Mann-Whitney U of the learned policy against it, two-sided


def judge(seeds: Records) -> list[Row]:
    """Every policy over the seeds of a record, and the learned one against each other."""
    learned = [seed["net"]["ppo"] for seed in seeds]
    rows = []
    for name in POLICIES:
        net = [seed["net"][name] for seed in seeds]
        accuracy = iqm_interval([seed["accuracy"][name] for seed in seeds], CONFIDENCE).mean
        wins = sum(a > b for a, b in zip(learned, net, strict=True))
        p = None if name == "ppo" else mann_whitney(learned, net)
        rows.append(Row(name, iqm_interval(net, CONFIDENCE), accuracy, wins, p))
    return rows


def table(seeds: Records) -> list[str]:
    """The seeds of a record in markdown."""
    lines: list[Line] = []
    for row in judge(seeds):
        name = "learned (ppo)" if row.policy == "ppo" else row.policy
        won = f"{row.wins} of {len(seeds)} random seeds"
        against = ("", "") if row.p is None else (won, f"{row.p:.4f}")
        lines.append((name, f"{row.accuracy:.2f}", bounds(row.net), *against))
    heads = "policy | accuracy (%) | accuracy - rent | learned ahead | Mann-Whitney p"
    return markdown(heads, lines)


def learning(records: Records) -> list[str]:
    """The newest evaluation of each kind of play in full, then all that were ever kept."""
    if not records:
        return []
    newest = {record["deterministic"]: record for record in records}
    lines = []
    for record in newest.values():
        title = f"{played(record).capitalize()}, evaluation {name_of(record, records)}:"
        lines += [title, "", *table(record["seeds"])]
    rows: list[Line] = []
    for record in records:
        first, *others = judge(record["seeds"])
        cells = [f"{row.net.mean:.2f}, {row.p:.3f}" for row in others]
        head = name_of(record, records), str(len(record["seeds"])), played(record)
        rows.append((*head, bounds(first.net), *cells))
    heads = " | ".join(f"{name}, p" for name in POLICIES[1:])
    heads = f"evaluation | random seeds | played | learned | {heads}"
    title = (
        f"Every evaluation that was looked at, accuracy - rent with {CONFIDENCE:.0%} t intervals:"
    )
    return [*lines, title, "", *markdown(heads, rows)[:-1]]


def played(record: Mapping) -> str:
    """How the learned policy chose."""
    return "likeliest choices" if record["deterministic"] else "choices sampled as in training"


def name_of(record: Mapping, records: Records) -> str:
    """The place of a record among those of its experiment, and its commit where it was kept."""
    number = next(place for place, found in enumerate(records, 1) if found is record)
    changed = f", {' '.join(record['settings'])}" if record["settings"] else ""
    return f"{number} (commit {record.get('commit', 'not kept')}{changed})"
