"""Did growth pay? The sentence follows the interval, whatever the control."""

import math
from dataclasses import replace

import numpy as np
import pytest

from esper_soa.config.settings import CONTROLS
from esper_soa.training.results.statistics import Interval, estimate
from esper_soa.training.results.verdict import (
    CONTROL_WORDS,
    Comparison,
    Episode,
    HostScore,
    compare,
    times,
    verdict,
)


def score(name: str, *rounds: list[float]) -> HostScore:
    episodes = [
        Episode([9.0] * len(own), own, [100.0] * len(own), [a - 1 for a in own], [1e6] * len(own))
        for own in rounds
    ]
    return HostScore(name, episodes)


NOTHING = "At equal env-steps, no difference from the control ({}) that this run could show"
AHEAD = "At equal env-steps, the grown hosts end ahead of the control"
BEHIND = "At equal env-steps, the grown hosts end behind the control"
PLAIN = "(without growth)"
ONE = "One host in one episode says little, and has no interval"
HIGHER = (2.0, 2.5, 3.0)
GAIN = "+2.50 points [+1.26, +3.74]"


@pytest.mark.parametrize(
    ("control", "differences", "words", "interval"),
    [
        ("wait", HIGHER, f"{AHEAD} {PLAIN}", GAIN),
        ("wait", (-2.0, -2.5, -3.0), f"{BEHIND} {PLAIN}", "-2.50 points [-3.74, -1.26]"),
        ("wait", (-2.0, 2.5, 3.0), NOTHING.format(PLAIN[1:-1]), "+1.17 points [-5.67, +8.01]"),
        ("wait", (0.0, 0.0), NOTHING.format(PLAIN[1:-1]), "+0.00 points"),
        ("random", HIGHER, f"{AHEAD} (random play)", GAIN),
        ("schedule", HIGHER, f"{AHEAD} (schedule)", GAIN),
        ("static_final", HIGHER, f"{AHEAD} (final topology from the start)", GAIN),
        ("mine:Agent", HIGHER, f"{AHEAD} (agent Agent)", GAIN),
        ("static_large", (-2.0, -2.1), f"{BEHIND} (wider host)", "-2.05 points [-2.69, -1.41]"),
        (
            "static_final",
            (1.0, -1.0),
            NOTHING.format("final topology from the start"),
            "+0.00 points [-12.71, +12.71]",
        ),
        ("schedule", (3.0,), ONE, "+3.00 points"),
    ],
)
def test_the_sentence_says_which_side_of_nothing_the_interval_lies_on(
    control: str, differences: tuple[float, ...], words: str, interval: str
) -> None:
    other = score(control, [50.0] * len(differences))
    grown = score("ppo", [50 + difference for difference in differences])
    size = "1.00 times the parameters and 1.00 times the training FLOP"
    assert verdict(compare(grown, other), control) == f"{words}: {interval} for {size}."


def test_every_control_has_words() -> None:
    assert tuple(CONTROL_WORDS) == CONTROLS


def test_the_figures_of_hosts_are_over_those_that_have_them() -> None:
    first = Episode([50.0, 70.0], [40.0, 60.0], [100, 300], [30.0, 50.0], [1e6, 3e6], [2.0, 4.0])
    first.all_flop.extend([2e6, 4e6])
    lost = math.inf, math.nan
    second = Episode([lost[0], 70.0], [lost[1], 80.0], [500, 700], [lost[1], 70.0], [5e6, 7e6])
    second.test_losses.extend([lost[1], 6.0])
    assert HostScore("ppo", [first, second]).figures == {
        "test_loss": 4.0,
        "perplexity": math.exp(4.0),
        "test_accuracy": 60.0,
        "best": 60.0,  # of the first host with 70
        "validation_accuracy": pytest.approx(190 / 3),
        "net": 50.0,
        "size": 400.0,
        "flop": 4e6,
        "flop_with_validation": 3e6,
    }
    nowhere = Episode([lost[0]], [lost[1]], [0.0], [lost[1]], [0.0], [710.0])
    figures = HostScore("ppo", [nowhere]).figures
    assert figures["perplexity"] == math.inf
    assert math.isnan(figures["best"] + figures["net"])
    found = compare(HostScore("ppo", [first]), HostScore("wait", [nowhere, nowhere]))
    assert math.isnan(found.parameters + found.train_flop + found.test_accuracy.low)


def test_rounds_are_paired_in_their_order_and_net_of_rent_is_a_difference_of_its_own() -> None:
    grown = score("ppo", [51.0, 53.0], [52.0, 54.0])
    control = score("wait", [50.0, 51.0], [49.0, 50.0])
    control.episodes[1].nets[:] = [40.0, 41.0]
    for part, losses in ((grown, [1.0, 2.0]), (control, [2.0, 5.0])):
        for episode in part.episodes:
            episode.test_losses.extend(losses)
    found = compare(grown, control)
    assert found.test_loss.mean == -2.0
    assert (found.test_accuracy.mean, found.pairs) == (pytest.approx((1 + 2 + 3 + 4) / 4), 4)
    assert found.net.mean == pytest.approx((1 + 2 + 11 + 12) / 4)
    assert found.test_accuracy.high - found.test_accuracy.mean == pytest.approx(
        3.1824 * math.sqrt(5 / 3) / 2, rel=1e-4
    )


def test_intervals_of_accuracies_are_over_hosts_and_test_samples_where_answers_are_known() -> None:
    right = np.array([[[1, 2, 0, -1], [2, 2, -1, 1]], [[2, 1, 1, -1], [0, 1, -1, 2]]])
    left = np.array([[[1, 0, 0, -1], [2, 1, -1, 1]], [[0, 1, 0, -1], [0, 0, -1, 1]]])
    sides = []
    for name, answers in (("ppo", right), ("wait", left)):
        means = [[50 * row[row >= 0].mean() for row in rows] for rows in answers]
        side = score(name, *means)
        episodes = [
            replace(episode, answers=rows)
            for episode, rows in zip(side.episodes, answers, strict=True)
        ]
        sides.append(HostScore(name, episodes, num_targets=2))
    found = compare(*sides)
    met = np.where(right < 0, np.nan, 50.0 * (right - left)).reshape(4, 4)
    wanted = estimate(np.nanmean(met, 1).tolist(), 0.95, met)
    assert found.test_accuracy == found.net == pytest.approx(wanted.interval)
    assert (found.p, found.sampled) == (pytest.approx(wanted.p), True)
    assert not compare(sides[0], without_answers(sides[1])).sampled
    lost = replace(sides[0].episodes[0], test_accuracies=[math.nan, 50.0])
    kept = compare(replace(sides[0], episodes=[lost, sides[0].episodes[1]]), sides[1])
    assert (kept.pairs, kept.sampled) == (3, True)


def without_answers(side: HostScore) -> HostScore:
    return replace(side, episodes=[replace(episode, answers=[]) for episode in side.episodes])


def test_an_infinite_accuracy_takes_its_pair_along() -> None:
    found = compare(score("ppo", [51.0, math.inf, 53.0]), score("wait", [50.0, 50.0, math.nan]))
    assert (found.pairs, found.left_out, found.test_accuracy.mean) == (1, 2, 1.0)
    none = compare(score("ppo", [math.nan]), score("heuristic", [50.0]))
    assert verdict(none, "heuristic") == (
        "Nothing to compare with the control (heuristic): no pair of finite accuracies."
    )


def test_the_ratios_are_those_of_the_means() -> None:
    grown = HostScore(
        "ppo", [Episode([1.0, 1.0], [1.0, 1.0], [300.0, 500.0], [1.0, 1.0], [3e6, 4e6])]
    )
    control = HostScore(
        "wait", [Episode([1.0, 1.0], [1.0, 1.0], [100.0, 100.0], [1.0, 1.0], [1e6, 1e6])]
    )
    found = compare(grown, control)
    assert (found.parameters, found.train_flop) == (4.0, 3.5)
    assert "for 4.0 times the parameters and 3.5 times the training FLOP" in verdict(found, "wait")
    at_equal_cost = verdict(found, "wait", equal="training FLOP")
    assert at_equal_cost.startswith("At equal training FLOP, ")
    assert at_equal_cost.endswith("for 4.0 times the parameters.")


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.873, "0.87 times"), (1.0, "1.00 times"), (4.803, "4.8 times"), (1234.56, "1,234.6 times")],
)
def test_ratios_are_told_as_finely_as_they_say_something(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_an_interval_decides_and_not_the_mean_alone() -> None:
    def outcome(low: float, high: float, pairs: int = 5) -> str:
        interval = Interval((low + high) / 2, low, high)
        return Comparison(interval, interval, interval, 0.5, False, pairs, 0, 1.0, 1.0).outcome

    assert [outcome(0.1, 3), outcome(-3, -0.1)] == ["gained", "lost"]
    assert [outcome(-0.1, 3), outcome(0.0, 3), outcome(-3, 0.0)] == ["unclear"] * 3
    assert outcome(0.1, 3, pairs=1) == "unclear"
