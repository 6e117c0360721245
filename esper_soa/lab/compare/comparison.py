"""The comparison of groups of runs: paired by seed, against the first, by exact tests.

A seed counts as one: its hosts are played by one policy on one data order. Needs no torch.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import sub
from statistics import stdev
from typing import NamedTuple

import numpy as np

from esper_soa.lab.rank_tests import holm, signed_rank, sum_shares
from esper_soa.lab.run_folders import MEASURES
from esper_soa.system.json_lines import Json
from esper_soa.training.results.statistics import Interval, mean_interval

CONFIDENCE = 0.95  # of the intervals
SIGNIFICANCE = 0.05  # of p values that are corrected for the number of comparisons
STUDY_POWER = 0.8  # with which `detectable` is found
SIMULATED_STUDIES = 20_000  # drawn to find it
# by group, then by measure, a number per seed
Numbers = Mapping[str, Mapping[str, Sequence[float]]]


class MeasureComparison(NamedTuple):
    """A group against the first in one of MEASURES: group less first, paired by seed."""

    group: str
    reference: str
    measure: str
    differences: tuple[float, ...]  # by seed, percent points
    interval: Interval  # of their mean, for CONFIDENCE
    p: float  # exact two-sided signed rank test
    corrected: float  # p by Holm, over all comparisons of the study
    comparisons: int

    @property
    def effect(self) -> float:
        """Mean over standard deviation of the differences, times Hedges' factor (Hedges 1981)."""
        mean = self.interval.mean
        if self.spread == 0:
            return math.copysign(math.inf, mean) if mean else 0.0
        return (1 - 3 / (4 * (len(self.differences) - 1) - 1)) * mean / self.spread

    @property
    def spread(self) -> float:
        """Standard deviation of the differences; 0 for a single one."""
        return stdev(self.differences) if len(self.differences) > 1 else 0.0

    @property
    def wins(self) -> int:
        """Seeds with which the group was above the first."""
        return sum(difference > 0 for difference in self.differences)

    @property
    def verdict(self) -> str:
        """above or below where both the interval and the corrected test say so."""
        if self.corrected < SIGNIFICANCE and self.interval.low > 0:
            return "above"
        if self.corrected < SIGNIFICANCE and self.interval.high < 0:
            return "below"
        return "no difference shown"

    @property
    def power(self) -> str:
        """Text of what no significant difference leaves open; "" where there is one."""
        if self.verdict != "no difference shown":
            return ""
        seeds = len(self.differences)
        least = fewest_seeds(self.comparisons)
        if seeds < least:
            over = f"at {SIGNIFICANCE:.0%} over {self.comparisons} comparisons"
            return f"{seeds} seeds cannot show any difference {over}: take {least} or more"
        effect = self.spread * detectable(seeds, self.comparisons)
        share = f"{effect:.2f} points in {STUDY_POWER:.0%} of studies"
        return f"{seeds} seeds find a difference of {share}; smaller ones stay open"

    def record(self) -> dict[str, Json]:
        """The fields of a comparison in compare.json."""
        fields = self._asdict() | self.interval._asdict()
        del fields["interval"], fields["comparisons"]
        values = {"effect": self.effect, "won": self.wins, "verdict": self.verdict}
        return fields | values | {"power": self.power}


def compare_groups(groups: Numbers) -> list[MeasureComparison]:
    """Every group against the first in every measure; ValueError where groups differ in seeds."""
    first, *others = groups
    sizes = {len(values) for group in groups.values() for values in group.values()}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} seeds cannot be paired")
    rows = [(group, measure) for measure in MEASURES for group in others]
    pairs = [(groups[group][measure], groups[first][measure]) for group, measure in rows]
    differences = [tuple(map(sub, *pair)) for pair in pairs]
    intervals = [mean_interval(paired, CONFIDENCE) for paired in differences]
    p_values = [signed_rank(paired) for paired in differences]
    columns = zip(rows, differences, intervals, p_values, holm(p_values), strict=True)
    return [
        MeasureComparison(
            group,
            first,
            measure,
            differences=paired,
            interval=interval,
            p=p,
            corrected=corrected,
            comparisons=len(rows),
        )
        for (group, measure), paired, interval, p, corrected in columns
    ]


@lru_cache(maxsize=256)
def detectable(seeds: int, comparisons: int = 1) -> float:
    """The mean difference that a study of so many seeds finds with POWER, in standard deviations of
    differences, which are normal.

    By drawing: STUDIES studies, always the same, and the signed rank test at SIGNIFICANCE over the
    number of comparisons, which is Holm's first step. Infinite where none could be significant.
    """
    if seeds < fewest_seeds(comparisons):
        return math.inf
    # the least sum of positive ranks that is significant, by the share of each sum or more
    tails = sum_shares(range(1, seeds + 1))[::-1].cumsum()[::-1]
    needed = int(np.argmax(2 * tails < SIGNIFICANCE / comparisons))
    draws = np.random.default_rng(0).normal(size=(SIMULATED_STUDIES, seeds))
    low = 0.0
    high = 8.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        studies = draws + middle
        ranks = np.abs(studies).argsort(1).argsort(1) + 1
        power = (np.where(studies > 0, ranks, 0).sum(1) >= needed).mean()
        low, high = (low, middle) if power >= STUDY_POWER else (middle, high)
    return high


def fewest_seeds(comparisons: int = 1) -> int:
    """The number of seeds below which no difference is significant, not even one of every seed."""
    # 2 / 2^n is the least p of n seeds
    return math.floor(math.log2(2 * comparisons / SIGNIFICANCE)) + 1
