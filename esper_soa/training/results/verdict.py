"""Did growth pay? Grown hosts and those of a control, pair by pair, and a sentence that says so.

A host whose accuracy is not finite is left out, and so is its pair. Needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from operator import itemgetter, sub
from statistics import fmean
from typing import NamedTuple

import numpy as np

from esper_soa.config.registry import name_in
from esper_soa.training.results.statistics import (
    Estimate,
    Interval,
    estimate,
    paired_answers,
    percent_right,
)

CONFIDENCE_LEVEL = 0.95  # confidence of the intervals
CONTROL_WORDS = {
    "wait": "without growth",
    "static_final": "final topology from the start",
    "static_large": "wider host",
    "random": "random play",
    "heuristic": "heuristic",
    "schedule": "schedule",
}
# By control_budget, what a grown host and the host of a control beside it have alike.
BUDGET_WORDS = {"steps": "env-steps", "images": "training {samples}", "flop": "training FLOP"}
GAINED = "gained"
LOST = "lost"
UNCLEAR = "unclear"
MOST_NATS = 709.0  # whose exponential is a double


def exponential(nats: float) -> float:
    """exp(nats), infinite where that is no double."""
    return math.inf if nats > MOST_NATS else math.exp(nats)


def control_text(name: str) -> str:
    """The name of a control in tables; an agent of a user's own goes by its name."""
    return CONTROL_WORDS.get(name, f"agent {name_in(name)}")


# settings of an env, by dotted name, and their values
Configuration = tuple[tuple[str, float | str], ...]


@dataclass(frozen=True)
class Episode:
    """How the hosts of one round stood at the last env-step, one number per env."""

    validation_accuracies: list[float]  # percent
    test_accuracies: list[float]  # percent
    parameters: list[float]  # trainable ones, of the host and the seeds that take part in it
    nets: list[float]  # test accuracies less rent, percent points
    train_flop: list[float]  # FLOP of all training of the episode
    test_losses: list[float] = field(default_factory=list)  # nats, mean over the targets
    # By dotted name, the values of settings that differ by env.
    settings: dict[str, list[float | str]] = field(default_factory=dict)
    # FLOP of training and of validation, each alpha row as a pass of the whole network.
    all_flop: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)  # env-steps
    validation_losses: list[float] = field(default_factory=list)  # nats, mean over the targets
    # Right targets of each test sample, [J] by env, -1 = none of its data set; empty: not known.
    answers: Sequence[np.ndarray] = field(default_factory=list, compare=False)

    @property
    def configurations(self) -> list[Configuration]:
        """The settings of each env that differ by env; empty where nothing differs."""
        rows = zip(*self.settings.values(), strict=True)
        return [tuple(zip(self.settings, values, strict=True)) for values in rows]

    def part(self, wanted: Configuration) -> "Episode":
        """The episode of the envs with this configuration, in which no setting differs."""
        keep = [configuration == wanted for configuration in self.configurations]
        rows = {name: row for name, row in vars(self).items() if name != "settings"}
        kept = {name: list(compress(row, keep)) for name, row in rows.items()}
        return Episode(**kept, settings={})


@dataclass(frozen=True)
class HostScore:
    """How the hosts did in the last rounds; means are over hosts and episodes."""

    name: str  # name of the policy or control
    episodes: list[Episode]  # oldest first, at least one
    num_targets: int = 1  # of a test sample

    @cached_property
    def figures(self) -> dict[str, float]:
        """Figures of the hosts for tables and summary.json, by name."""
        test_loss = self.mean("test_losses")
        both = zip(self.flat("validation_accuracies"), self.flat("test_accuracies"), strict=True)
        finite = (pair for pair in both if math.isfinite(pair[0]))
        return {
            "test_loss": test_loss,  # nats
            "perplexity": exponential(test_loss),
            "test_accuracy": self.mean("test_accuracies"),  # percent
            # Percent, of the host with the highest validation accuracy, the first.
            "best": max(finite, key=itemgetter(0), default=(math.nan, math.nan))[1],
            "validation_accuracy": self.mean("validation_accuracies"),  # percent
            "net": self.mean("nets"),  # test accuracy less rent, percent points
            "size": self.mean("parameters"),
            "flop": self.mean("train_flop"),  # FLOP of training, per host and episode
            "flop_with_validation": self.mean("all_flop"),  # FLOP of training and validation
        }

    @property
    def configurations(self) -> list[Configuration]:
        """Each that hosts have, once; empty where no setting differs by env."""
        return list(dict.fromkeys(chain(*(part.configurations for part in self.episodes))))

    def part(self, wanted: Configuration) -> "HostScore":
        """The score of the hosts with this configuration."""
        episodes = [
            part for part in (episode.part(wanted) for episode in self.episodes) if part.parameters
        ]
        return replace(self, episodes=episodes)

    @property
    def env_steps(self) -> int:
        """Env-steps of all hosts."""
        return sum(sum(episode.num_steps) for episode in self.episodes)

    def flat(self, name: str) -> list[float]:
        """The field `name` of all episodes, one after the other."""
        return [value for episode in self.episodes for value in vars(episode)[name]]

    def answers(self, kept: Sequence[bool]) -> np.ndarray | None:
        """Percent of the targets of each test sample [R, J] that the hosts for which `kept` is true
        have right, NaN where one has not met it; None where it is not known.
        """
        rows = [row for episode in self.episodes for row in episode.answers]
        if len(rows) != len(kept) or not any(kept):
            return None
        return percent_right(np.array(list(compress(rows, kept))), self.num_targets)

    def mean(self, name: str) -> float:
        """The mean of the finite values of a field; NaN where there are none."""
        finite = [value for value in self.flat(name) if math.isfinite(value)]
        return fmean(finite) if finite else math.nan


class Comparison(NamedTuple):
    """The grown hosts less the control's, same host and same episode; grown over control."""

    test_accuracy: Interval  # percent points
    net: Interval  # the same of test accuracy less rent
    test_loss: Interval  # nats, over hosts alone
    p: float  # of the difference in test accuracy being 0, of the same t as its interval
    sampled: bool  # whether the first two are over test samples too, as answers to each are known
    pairs: int  # hosts times episodes that both sides have a finite test accuracy of
    left_out: int  # pairs that they have not
    parameters: float  # ratio of the means
    train_flop: float

    @property
    def outcome(self) -> str:
        """GAINED or LOST where the interval of test accuracy is on one side of 0, else UNCLEAR."""
        if self.pairs > 1 and self.test_accuracy.low > 0:
            return GAINED
        return LOST if self.pairs > 1 and self.test_accuracy.high < 0 else UNCLEAR


def compare(grown: HostScore, control: HostScore) -> Comparison:
    """Paired differences with t intervals over hosts and test samples, where the answers to each
    are known; of one pair they are infinite, of none NaN.
    """
    pairs = zip(grown.flat("test_accuracies"), control.flat("test_accuracies"), strict=True)
    both_finite = [math.isfinite(first) and math.isfinite(other) for first, other in pairs]
    answers = paired_answers(*(side.answers(both_finite) for side in (grown, control)))

    def difference(name: str, answers: np.ndarray | None = None) -> Estimate:
        first, other = (compress(side.flat(name), both_finite) for side in (grown, control))
        values = list(map(sub, first, other))
        return estimate(values, CONFIDENCE_LEVEL, answers)

    def ratio(name: str) -> float:
        return grown.figures[name] / control.figures[name] if control.figures[name] else math.nan

    accuracy = difference("test_accuracies", answers)
    return Comparison(
        accuracy.interval,
        difference("nets", answers).interval,  # no test sample changes the rent
        difference("test_losses").interval,
        p=accuracy.p,
        sampled=accuracy.sampled,
        pairs=sum(both_finite),
        left_out=len(both_finite) - sum(both_finite),
        parameters=ratio("size"),
        train_flop=ratio("flop"),
    )


def verdict(comparison: Comparison, control: str, equal: str = BUDGET_WORDS["steps"]) -> str:
    """One sentence for a reader who has seen nothing else; `control` is its name, equal: what it
    has as much of as the grown hosts.
    """
    other = f"the control ({control_text(control)})"
    if comparison.pairs == 0:
        return f"Nothing to compare with {other}: no pair of finite accuracies."
    size = f"{times(comparison.parameters)} the parameters"
    facts = f"{comparison.test_accuracy.text(unit='points')} for {size}"
    if equal != BUDGET_WORDS["flop"]:
        facts += f" and {times(comparison.train_flop)} the training FLOP"
    if comparison.pairs == 1:
        return f"One host in one episode says little, and has no interval: {facts}."
    if comparison.outcome == UNCLEAR:
        return f"At equal {equal}, no difference from {other} that this run could show: {facts}."
    side = "ahead of" if comparison.outcome == GAINED else "behind"
    return f"At equal {equal}, the grown hosts end {side} {other}: {facts}."


def times(ratio: float) -> str:
    """'4.8 times', '0.97 times'."""
    return f"{ratio:,.{2 if ratio < 2 else 1}f} times"
