"""Who is ahead of all others: the best by its mean, with p for all pairs, and a sentence."""

import math

import numpy as np
import pytest

from esper_soa.lab.compare.lead import lead_sentence, rank_pairs
from esper_soa.training.results.statistics import estimate, holm, paired_answers

NUMBERS = {"a": [50.0, 51.0, 52.0], "b": [60.0, 61.5, 62.0], "c": [59.0, 61.0, 61.5]}


def table(numbers: dict[str, list[float]], measure: str) -> dict[str, dict[str, list[float]]]:
    return {group: {measure: values} for group, values in numbers.items()}


def test_all_pairs_are_tested_and_the_best_comes_first() -> None:
    pairs = rank_pairs(table(NUMBERS, "test_accuracy"), "test_accuracy", {})
    assert [(pair.group, pair.other) for pair in pairs] == [("b", "c"), ("b", "a"), ("c", "a")]
    found = [estimate(row, 0.95) for row in ([1.0, 0.5, 0.5], [10.0, 10.5, 10.0], [9.0, 10.0, 9.5])]
    assert [pair.interval for pair in pairs] == [row.interval for row in found]
    assert [pair.corrected for pair in pairs] == holm([row.p for row in found])
    assert pairs[0].corrected > 0.05 > pairs[1].corrected
    sentence = lead_sentence(pairs, "At equal env-steps")
    assert sentence.startswith(
        "At equal env-steps, no group was shown ahead of all others; b is first, by 0.67 points "
    )
    assert f"over c, the next (p = {pairs[0].corrected:.2g} of 3 pairs together, over" in sentence
    apart = rank_pairs(table(NUMBERS | {"c": [40.0, 41.0, 43.0]}, "net"), "net", {})
    assert "At 6 GFLOP, b is ahead of all others: by 10.17 points [" in lead_sentence(
        apart, "At 6 GFLOP"
    )


def test_of_losses_the_least_is_first_and_of_unknown_ones_none() -> None:
    numbers = NUMBERS | {"d": [math.nan] * 3}
    pairs = rank_pairs(table(numbers, "test_loss"), "test_loss", {"a": np.ones((3, 4))})
    assert [(pair.group, pair.other) for pair in pairs[:3]] == [("a", "c"), ("a", "b"), ("a", "d")]
    assert pairs[0].interval.mean == pytest.approx(9.5)
    assert "a is first, by 9.5000 nats [" in lead_sentence(pairs, "At 6 GFLOP")


def test_test_samples_are_a_source_of_chance_of_accuracies() -> None:
    rng = np.random.default_rng(0)
    answers = {group: 100.0 * rng.integers(0, 2, (3, 50)) for group in "ab"}
    numbers = {group: rows.mean(1).tolist() for group, rows in answers.items()}
    (pair,) = rank_pairs(table(numbers, "test_accuracy"), "test_accuracy", answers)
    columns = numbers[pair.group], numbers[pair.other]
    differences = [value - beside for value, beside in zip(*columns, strict=True)]
    found = estimate(differences, 0.95, paired_answers(answers[pair.group], answers[pair.other]))
    assert (pair.interval, pair.p, pair.sampled) == (found.interval, found.p, True)
    assert "over random seeds and test samples)" in lead_sentence([pair], "At 6 GFLOP")
