"""What the proof says: every player over the seeds, and the learned policy against each control.

Given a data set of a record of benchmarks/proof.py: per player, and by MEASURES and SIZES, a list
of seeds of a list of hosts. A seed counts as one: hosts of a seed are played by one policy on one
data order.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.intervals import (
    difference_interval,
    improvement_interval,
    iqm_interval,
    mean_interval,
)
from benchmarks.rank_tests import mann_whitney
from benchmarks.records import CONFIDENCE
from esper_soa.training.results.statistics import Interval

SIGNIFICANCE = 0.01  # of the Mann-Whitney p of a verdict
LEARNED = "learned"
MEASURES = {
    "accuracy": "accuracy",
    "net": "accuracy - rent",
}  # by key in the record, both in percent points
LEVELS = MEASURES | {"validation_accuracy": "validation accuracy"}
SIZES = ("parameters", "train_flop")


class Level(NamedTuple):
    """A player over the seeds."""

    player: str
    means: dict[str, Interval]  # by LEVELS: interquartile mean of the means of seeds
    sizes: dict[str, Interval]  # by SIZES: mean of the means of seeds, per host


class Comparison(NamedTuple):
    """Learned less control in one of MEASURES, paired by seed."""

    control: str
    measure: str
    difference: Interval  # mean of the seeds' differences
    middle: Interval  # their interquartile mean
    p: float  # exact two-sided Mann-Whitney U of seeds against seeds
    improvement: Interval  # P(learned > control) over pairs of seeds
    seeds_won: int
    seeds: int
    hosts_won: int  # pairs of the same host
    hosts: int
    shares: dict[str, float]  # by SIZES: the learned policy's mean over the control's

    @property
    def verdict(self) -> str:
        """ahead or behind where both the paired interval and the test say so."""
        if self.p < SIGNIFICANCE and self.difference.low > 0:
            return "ahead"
        if self.p < SIGNIFICANCE and self.difference.high < 0:
            return "behind"
        return "no difference shown"


def seed_means(hosts: Sequence[Sequence[float]]) -> list[float]:
    """The mean over its hosts of every seed."""
    return [fmean(values) for values in hosts]


def levels(players: Mapping[str, Mapping]) -> list[Level]:
    """Every player of a data set, in the order of the record."""
    found = []
    for name, numbers in players.items():
        means = {
            measure: iqm_interval(seed_means(numbers[measure]), CONFIDENCE) for measure in LEVELS
        }
        sizes = {size: mean_interval(seed_means(numbers[size]), CONFIDENCE) for size in SIZES}
        found.append(Level(name, means, sizes))
    return found


def comparisons(players: Mapping[str, Mapping]) -> list[Comparison]:
    """The learned policy of a data set against every control, a row per measure."""
    size = {
        level.player: {name: mean.mean for name, mean in level.sizes.items()}
        for level in levels(players)
    }
    found = []
    for measure in MEASURES:
        for control in (name for name in players if name != LEARNED):
            mine, theirs = (players[name][measure] for name in (LEARNED, control))
            ours = seed_means(mine)
            others = seed_means(theirs)
            pairs = [
                pair
                for seeds in zip(mine, theirs, strict=True)
                for pair in zip(*seeds, strict=True)
            ]
            found.append(
                Comparison(
                    control=control,
                    measure=measure,
                    difference=difference_interval(ours, others, CONFIDENCE),
                    middle=iqm_interval(
                        [a - b for a, b in zip(ours, others, strict=True)], CONFIDENCE
                    ),
                    p=mann_whitney(ours, others),
                    improvement=improvement_interval(ours, others, CONFIDENCE),
                    seeds_won=sum(a > b for a, b in zip(ours, others, strict=True)),
                    seeds=len(ours),
                    hosts_won=sum(a > b for a, b in pairs),
                    hosts=len(pairs),
                    shares={name: size[LEARNED][name] / size[control][name] for name in SIZES},
                )
            )
    return found


class MainRuns(NamedTuple):
    """The main runs of a data set: grown hosts less the same without growth, in points."""

    differences: list[float]  # by seed, mean over its hosts
    over_hosts: Interval  # mean over all hosts of all seeds
    over_seeds: Interval  # mean over the seeds' means
    ahead: int  # seeds whose mean is above 0


def main_runs(grown: Sequence[Sequence[float]], control: Sequence[Sequence[float]]) -> MainRuns:
    """grown, control: accuracies (percent) by seed and host."""
    pairs = [
        pair for seeds in zip(grown, control, strict=True) for pair in zip(*seeds, strict=True)
    ]
    ours = seed_means(grown)
    others = seed_means(control)
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    return MainRuns(
        differences=differences,
        over_hosts=mean_interval([a - b for a, b in pairs], CONFIDENCE),
        over_seeds=mean_interval(differences, CONFIDENCE),
        ahead=sum(difference > 0 for difference in differences),
    )
