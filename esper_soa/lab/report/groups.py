"""Runs that differ in nothing but the seed belong together: groups by overrides, how each stands,
and every pair of groups with its exact test.

A run counts with one number, the mean test accuracy of its hosts at the end; hosts of a run are not
independent of each other. Runs that have not come to their end are left out, and counted. Needs no
torch.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from esper_soa.lab.rank_tests import holm, mann_whitney
from esper_soa.lab.report.run_files import RunRecord, mean_of, number
from esper_soa.training.results.statistics import Interval, difference_interval, mean_interval

# Overrides that say where and how a run is done, or are repeated on purpose: they make no group.
IGNORED_SETTINGS = re.compile(
    r"(seed|name|run_dir|resume|report|track|profile|device|checkpoint_\w+|(hydra|compute|telemetry)\..*)"
)
CONFIDENCE = 0.95
SIGNIFICANCE = 0.05  # of the tests, all comparisons together


class RunGroup(NamedTuple):
    """Runs of the same overrides but for the seed."""

    label: str
    runs: list[RunRecord]

    @property
    def ended(self) -> list[RunRecord]:
        """Those that have come to their end with a finite test accuracy."""
        return [run for run in self.runs if run.accuracy is not None]

    @property
    def accuracies(self) -> list[float]:
        """Percent, of the runs that have ended."""
        return [run.accuracy for run in self.runs if run.accuracy is not None]


class FinishedGroup(NamedTuple):
    """A group by the runs that have come to their end."""

    label: str
    runs: int  # that have ended
    left_out: int  # that have not
    accuracy: Interval  # of the test images, percent, mean over runs
    # Percent points over the control, mean over runs; None where one has no control.
    gain: Interval | None
    parameters: float | None  # mean over runs and hosts
    train_flop: float | None


class Pair(NamedTuple):
    label: str
    other: str
    # Percent points, of runs of the same seed; None where the seeds are not the same.
    difference: Interval | None
    p: float  # of Mann and Whitney's exact test
    adjusted: float  # p for all comparisons together (Holm 1979)


def groups_of(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """The runs by their overrides, in the order of their first runs."""
    by_key: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        by_key.setdefault(key_of(run), []).append(run)
    common = set.intersection(*(set(key) for key in by_key)) if by_key else set()
    groups = []
    for key, members in by_key.items():
        distinct = [override for override in key if override not in common]
        names = dict.fromkeys(str(run.settings.get("name", run.label)) for run in members)
        label = ", ".join(distinct or names)
        groups.append(RunGroup(label, [replace(run, group=label) for run in members]))
    return groups


def key_of(run: RunRecord) -> tuple[str, ...]:
    """The overrides that decide what a run does, sorted."""
    plain = (override.lstrip("+") for override in run.overrides)
    return tuple(sorted(x for x in plain if not IGNORED_SETTINGS.fullmatch(x.partition("=")[0])))


def differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """The settings in which the runs differ, by name: a value per run, empty where it has none."""
    names = sorted(set().union(*(run.settings for run in runs)))
    by_name = {name: [str(run.settings.get(name, "")) for run in runs] for name in names}
    return {name: values for name, values in by_name.items() if len(set(values)) > 1}


def standings(groups: Sequence[RunGroup]) -> list[FinishedGroup]:
    """Every group that has a run at its end, the highest accuracy first."""
    rows = []
    for group in groups:
        ended = group.ended
        gains = [run.gain for run in ended if run.gain is not None]
        if ended:
            finished = FinishedGroup(
                group.label,
                len(ended),
                len(group.runs) - len(ended),
                accuracy=mean_interval(group.accuracies, CONFIDENCE),
                gain=mean_interval(gains, CONFIDENCE) if len(gains) == len(ended) else None,
                parameters=mean_of([number(run.summary, "grown", "size") for run in ended]),
                train_flop=mean_of([number(run.summary, "grown", "flop") for run in ended]),
            )
            rows.append(finished)
    return sorted(rows, key=lambda finished: -finished.accuracy.mean)


def pairs(groups: Sequence[RunGroup]) -> list[Pair]:
    """All pairs of groups with runs at their end, surest first; p also for all pairs together."""
    all_pairs = list(combinations([group for group in groups if group.ended], 2))
    ps = [mann_whitney(first.accuracies, other.accuracies) for first, other in all_pairs]
    results = [
        Pair(first.label, other.label, _difference(first, other), p=p, adjusted=adjusted)
        for (first, other), p, adjusted in zip(all_pairs, ps, holm(ps), strict=True)
    ]
    return sorted(results, key=lambda pair: pair.p)


def _difference(group: RunGroup, other: RunGroup) -> Interval | None:
    first = {number(run.settings, "seed"): run.accuracy or 0.0 for run in group.ended}
    second = {number(run.settings, "seed"): run.accuracy or 0.0 for run in other.ended}
    repeated = len(first) < len(group.ended) or len(second) < len(other.ended)
    if first.keys() != second.keys() or repeated or len(first) < 2:
        return None
    return difference_interval(list(first.values()), [second[seed] for seed in first], CONFIDENCE)
