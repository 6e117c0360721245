"""The comparison of groups of runs: paired by random seed, against the first, by t tests.

A random seed counts as one: its hosts are played by one policy on one data order. Needs no torch.
"""

import math
from collections.abc import Mapping, Sequence
from operator import sub
from statistics import stdev
from typing import NamedTuple

import numpy as np

from esper_soa.lab.run_folders import MEASURES
from esper_soa.system.json_lines import Json
from esper_soa.training.results.statistics import (
    Interval,
    detectable,
    estimate,
    holm,
    paired_answers,
)

CONFIDENCE = 0.95  # of the intervals
SIGNIFICANCE = 0.05  # of p values that are corrected for the number of comparisons
STUDY_POWER = 0.8  # of the least difference that a study is said to find
# by group, then by measure, a number per random seed
Numbers = Mapping[str, Mapping[str, Sequence[float]]]
# By group, percent of the targets of each test sample that hosts have right, mean over hosts: a row
# per random seed; None where it is not known.
SampleMeans = Mapping[str, np.ndarray | None]
NO_SAMPLES: SampleMeans = {}


class MeasureComparison(NamedTuple):
    """A group against the first in one of MEASURES: group less first, paired by seed."""

    group: str
    reference: str
    measure: str
    differences: tuple[float, ...]  # by random seed, percent points
    interval: Interval  # of their mean, for CONFIDENCE
    p: float  # two-sided, of the same t
    corrected: float  # p by Holm, over all comparisons of the study
    comparisons: int
    least: float  # percent points that such a study finds with STUDY_POWER
    sampled: bool  # whether test samples are a source of chance beside random seeds

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
        """above or below where the corrected test says so."""
        if self.corrected < SIGNIFICANCE:
            return "above" if self.interval.mean > 0 else "below"
        return "no difference shown"

    @property
    def power(self) -> str:
        """Text of what no significant difference leaves open; "" where there is one."""
        if self.verdict != "no difference shown":
            return ""
        seeds = len(self.differences)
        if seeds < 2:
            return "a single random seed cannot show any difference: take 2 or more"
        share = f"{self.least:.2f} points in {STUDY_POWER:.0%} of studies"
        return f"{seeds} random seeds find a difference of {share}; smaller ones stay open"

    def record(self) -> dict[str, Json]:
        """The fields of a comparison in compare.json."""
        fields = self._asdict() | self.interval._asdict()
        del fields["interval"], fields["comparisons"]
        values = {"effect": self.effect, "won": self.wins, "verdict": self.verdict}
        return fields | values | {"power": self.power}


def compare_groups(groups: Numbers, samples: SampleMeans = NO_SAMPLES) -> list[MeasureComparison]:
    """Every group against the first in every measure; ValueError where groups differ in seeds.

    samples: where both groups have met as many, test samples are a source of chance as well.
    """
    first, *others = groups
    sizes = {len(values) for group in groups.values() for values in group.values()}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} random seeds cannot be paired")
    rows = [(group, measure) for measure in MEASURES for group in others]
    pairs = [(groups[group][measure], groups[first][measure]) for group, measure in rows]
    differences = [tuple(map(sub, *pair)) for pair in pairs]
    answers = {group: paired_answers(samples.get(group), samples.get(first)) for group in others}
    found = [
        estimate(paired, CONFIDENCE, answers[group])
        for paired, (group, _) in zip(differences, rows, strict=True)
    ]
    corrected = holm([row.p for row in found])
    columns = zip(rows, differences, found, corrected, strict=True)
    return [
        MeasureComparison(
            group,
            first,
            measure,
            differences=paired,
            interval=row.interval,
            p=row.p,
            corrected=p,
            comparisons=len(rows),
            least=detectable(row, SIGNIFICANCE / len(rows), STUDY_POWER),
            sampled=row.sampled,
        )
        for (group, measure), paired, row, p in columns
    ]
