"""What several runs say together: intervals over runs, and every pair of groups with its exact
test.

A run counts with one number, the mean accuracy of its hosts at the end; hosts of a run are not
independent of each other. Runs that have not come to their end are left out, and counted. Given
groups by page.py. Needs no torch.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from esper_soa.ops.statistics import (
    Interval,
    difference_interval,
    improvement_interval,
    iqm_interval,
    mann_whitney,
    mean_interval,
)
from esper_soa.report.groups import Group
from esper_soa.report.run_files import RunRecord, number

CONFIDENCE = 0.95
LEVEL = 0.05  # of the tests, all comparisons together


class Standing(NamedTuple):
    """A group by the runs that have come to their end."""

    label: str
    runs: int  # that have ended
    left_out: int  # that have not
    accuracy: Interval  # percent, mean over runs
    iqm: Interval  # percent, interquartile mean over runs
    # Percent points over the control, mean over runs; None where one has no control.
    gain: Interval | None
    parameters: float | None  # mean over runs and hosts
    train_flop: float | None


class Pair(NamedTuple):
    """Two groups beside each other."""

    label: str
    other: str
    # Percent points, of runs of the same seed; None where the seeds are not the same.
    difference: Interval | None
    better: Interval  # probability that a run of the first ends above one of the other
    p: float  # of Mann and Whitney's exact test
    adjusted: float  # p for all comparisons together (Holm 1979)


def accuracy_of(run: RunRecord) -> float | None:
    """Mean accuracy of the grown hosts at the end, percent; None where the run has not ended or it
    is not finite.
    """
    return number(run.summary, "grown", "accuracy")


def gain_of(run: RunRecord) -> float | None:
    """The same less the control's."""
    return number(run.summary, "difference", "accuracy", "mean")


def standings(groups: Sequence[Group]) -> list[Standing]:
    """Every group that has a run at its end, the highest accuracy first."""
    found = [_standing(group) for group in groups if _accuracies(group)]
    return sorted(found, key=lambda one: -one.accuracy.mean)


def _standing(group: Group) -> Standing:
    ended = [run for run in group.runs if accuracy_of(run) is not None]
    accuracies = list(_accuracies(group).values())
    gains = [gain_of(run) for run in ended]
    known = [gain for gain in gains if gain is not None]
    return Standing(
        group.label,
        len(ended),
        len(group.runs) - len(ended),
        mean_interval(accuracies, CONFIDENCE),
        iqm_interval(accuracies, CONFIDENCE),
        mean_interval(known, CONFIDENCE) if len(known) == len(ended) else None,
        _mean([number(run.summary, "grown", "size") for run in ended]),
        _mean([number(run.summary, "grown", "flop") for run in ended]),
    )


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """All pairs of groups with runs at their end, the surest first; p of each is also given for all
    together.
    """
    having = [group for group in groups if _accuracies(group)]
    found = [_pair(one, other) for one, other in combinations(having, 2)]
    found.sort(key=lambda pair: pair.p)
    adjusted = []
    highest = 0.0
    for place, pair in enumerate(found):
        highest = max(highest, min(1.0, pair.p * (len(found) - place)))
        adjusted.append(pair._replace(adjusted=highest))
    return adjusted


def _pair(one: Group, other: Group) -> Pair:
    mine = _accuracies(one)
    theirs = _accuracies(other)
    values = list(mine.values())
    others = list(theirs.values())
    by_seed = _by_seed(one)
    by_seed_other = _by_seed(other)
    paired = (
        by_seed.keys() == by_seed_other.keys() and len(by_seed) == len(values) and len(by_seed) > 1
    )
    difference = None
    if paired:
        difference = difference_interval(
            list(by_seed.values()), [by_seed_other[seed] for seed in by_seed], CONFIDENCE
        )
    better = improvement_interval(values, others, CONFIDENCE)
    return Pair(one.label, other.label, difference, better, mann_whitney(values, others), 1.0)


def _accuracies(group: Group) -> dict[str, float]:
    """By the run's label."""
    found = {run.label: accuracy_of(run) for run in group.runs}
    return {label: value for label, value in found.items() if value is not None}


def _by_seed(group: Group) -> dict[int, float]:
    found = {int(number(run.settings, "seed") or 0): accuracy_of(run) for run in group.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
