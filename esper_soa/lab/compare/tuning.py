"""Values of settings that are chosen for every side, by validation accuracy, or by the validation
loss where groups are ranked by loss, on random seeds that no table has. All values of a group are
envs of the same runs. Needs no torch.
"""

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple, TypeAlias

from esper_soa.lab.compare.grid import configurations_of, edges, format_value, widened
from esper_soa.lab.compare.study import Runs
from esper_soa.system.json_lines import Json
from esper_soa.training.results.verdict import Configuration

ACCURACY = "validation_accuracy"
LOSS = "validation_loss"
MEASURES = {ACCURACY: 1.0, LOSS: -1.0}  # 1 where more is better
MOST_WIDENINGS = 3  # of a grid whose best value lies at its edge

# Plays a run, given its runs and random seed; whether it has come to its end.
Play: TypeAlias = Callable[[Runs, int], bool]
# Means over hosts by name, a record for each random seed, of every configuration.
Tried: TypeAlias = dict[Configuration, list[dict[str, float]]]


class ChosenValues(NamedTuple):
    """The values that were chosen for a side."""

    values: Configuration
    measure: str  # of MEASURES, by which they were
    scores: Mapping[Configuration, float]  # its mean, of all that were tried
    train_flop: float  # FLOP of training a host with the chosen values
    # Numbers beyond the chosen ones that lie at the edge of the grid, by setting; NaN where the
    # setting cannot have one.
    edges: Mapping[str, float]

    @property
    def text(self) -> str:
        """The chosen values in words."""
        return " ".join(f"{name}={format_value(value)}" for name, value in self.values)

    @property
    def edge_texts(self) -> list[str]:
        """The chosen values that lie at the edge of the grid, in words."""
        return [
            f"{name}={format_value(value)} is the last value that "
            + ("the setting can have" if math.isnan(self.edges[name]) else "was tried")
            for name, value in self.values
            if name in self.edges
        ]

    def record(self) -> dict[str, Json]:
        """The fields in compare.json."""
        tried: list[Json] = [
            {"values": dict(values), self.measure: score} for values, score in self.scores.items()
        ]
        return {"values": dict(self.values), "tried": tried, "edges": list(self.edge_texts)}


class Tuning(NamedTuple):
    """The values that were chosen for a group and its final networks, and what that cost."""

    choices: Mapping[str, ChosenValues]  # by side
    flop: float  # FLOP of training all hosts
    seconds: float

    @property
    def values(self) -> tuple[Configuration, ...]:
        """The different values that were chosen."""
        return tuple(dict.fromkeys(choice.values for choice in self.choices.values()))


def tune(runs: Runs, play: Play) -> Tuning | None:
    """Choose values for every side of the runs' group; None where a run fails.

    runs: with the whole grid of the study. Where the best value of a side is the least or the
    largest number of the grid, further runs try the next one, MOST_WIDENINGS times at most.
    """
    study = runs.study
    sides = study.sides(runs.group)
    first = runs
    grid = study.grid
    tried: dict[str, Tried] = {side: {} for side in sides}
    costs = []
    for number in range(MOST_WIDENINGS + 1):
        for random_seed in study.tune_seeds:
            if not play(runs, random_seed):
                return None
            costs.append(run_cost(runs, random_seed))
            for side in sides:
                for values in runs.values:
                    (figures,) = runs.figures(random_seed, side, values).values()
                    tried[side].setdefault(values, []).append(figures)
        measure = measure_of(runs)
        ends = {side: edges(grid, best(means(tried[side], measure), measure)) for side in sides}
        wider = widened(grid, ends.values())
        further = tuple(row for row in configurations_of(wider) if row not in tried[sides[0]])
        if not further or number == MOST_WIDENINGS:
            break
        grid = wider
        place = f"{first.place}_wider_{number + 1}"
        runs = first._replace(place=place, values=further, planned=0)
    flop, seconds = map(sum, zip(*costs, strict=True))
    choices = {side: _choice(tried[side], ends[side], measure) for side in sides}
    return Tuning(choices, flop, seconds)


def run_cost(runs: Runs, random_seed: int) -> tuple[float, float]:
    """FLOP of training all hosts of a run, controls included, and its seconds."""
    summary = runs.summary(random_seed)
    settings = runs.study.settings[runs.group]
    flop = settings.rounds * summary["grown"]["flop"]
    flop += settings.control_rounds * sum(control["flop"] for control in summary["controls"])
    return runs.envs * flop, float(summary["wall_seconds"])


def measure_of(runs: Runs) -> str:
    """By which of MEASURES values are chosen in runs of which the first has ended."""
    by_loss = runs.summary(runs.study.tune_seeds[0])["perplexity"]
    return LOSS if by_loss else ACCURACY


def means(tried: Tried, measure: str) -> dict[Configuration, float]:
    """The mean of a measure over random seeds, of all configurations."""
    return {values: fmean(row[measure] for row in rows) for values, rows in tried.items()}


def best(scores: Mapping[Configuration, float], measure: str) -> Configuration:
    """The configuration with the highest accuracy or the lowest loss; one without any is last."""
    sign = MEASURES[measure]
    known = {
        values: -math.inf if math.isnan(score) else sign * score for values, score in scores.items()
    }
    return max(known, key=lambda values: known[values])


def _choice(tried: Tried, ends: Mapping[str, float], measure: str) -> ChosenValues:
    scores = means(tried, measure)
    values = best(scores, measure)
    flop = fmean(figures["train_flop"] for figures in tried[values])
    return ChosenValues(values, measure, scores, train_flop=flop, edges=ends)
