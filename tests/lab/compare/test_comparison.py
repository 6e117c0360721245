"""Comparisons of groups over seeds hold what they promise, on simulated studies of known truth."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from esper_soa.lab.compare.comparison import MEASURES, compare_groups, detectable, fewest_seeds
from esper_soa.lab.rank_tests import holm, signed_rank


def by_every_sign(differences: list[float]) -> float:
    """The signed rank test by its definition, over all ways to give signs."""
    sizes = np.abs(differences)
    ranks = [stats.rankdata(sizes)[index] for index, one in enumerate(differences) if one != 0]
    found = sum(stats.rankdata(sizes)[index] for index, one in enumerate(differences) if one > 0)
    sums = [
        sum(rank for rank, up in zip(ranks, ups, strict=True) if up)
        for ups in itertools.product((0, 1), repeat=len(ranks))
    ]
    below = np.mean([one <= found for one in sums])
    above = np.mean([one >= found for one in sums])
    return min(1.0, 2 * min(below, above))


@pytest.mark.parametrize(("count", "digits"), [(1, 3), (5, 0), (9, 0), (9, 3)])
def test_the_signed_rank_test_counts_all_signs_with_ties_and_zeros(count: int, digits: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(5):
        differences = rng.normal(0.4, 1, count).round(digits).tolist()
        assert signed_rank(differences) == pytest.approx(by_every_sign(differences), abs=1e-12)


def test_holm_raises_p_values_step_by_step() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def study(rng: np.random.Generator, seeds: int, shift: float) -> dict[str, dict[str, list[float]]]:
    """Two groups that share what a seed brings; the second is above by `shift`."""
    shared = rng.normal(70, 4, seeds)
    groups = {"a": shared + rng.normal(0, 1, seeds), "b": shared + rng.normal(0, 1, seeds) + shift}
    return {
        group: {measure: values.tolist() for measure in MEASURES}
        for group, values in groups.items()
    }


def test_two_hundred_comparisons_of_the_same_give_uniform_p() -> None:
    rng = np.random.default_rng(11)
    rows = [compare_groups(study(rng, 12, 0.0))[0] for _ in range(200)]
    p_values = np.array([row.p for row in rows])
    assert stats.kstest(p_values, "uniform").pvalue > 0.05
    assert 0.02 <= (p_values < 0.05).mean() <= 0.08
    assert (np.array([row.corrected for row in rows]) < 0.05).mean() <= 0.05


@pytest.mark.parametrize("seeds", [7, 20])
def test_a_planted_difference_is_found_with_the_promised_power(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    shift = math.sqrt(2) * detectable(seeds, comparisons=2)
    found = [compare_groups(study(rng, seeds, shift))[0] for _ in range(400)]
    # both measures are the same here, so that Holm asks both for its first step
    share = np.mean([row.corrected < 0.05 for row in found])
    assert share == pytest.approx(0.8, abs=0.06)  # three standard errors
    assert np.mean([row.interval.mean for row in found]) == pytest.approx(shift, abs=0.1)


def test_too_few_seeds_are_told() -> None:
    assert [fewest_seeds(one) for one in (1, 2, 4)] == [6, 7, 8]
    row = compare_groups(study(np.random.default_rng(0), 5, 100.0))[0]
    assert row.verdict == "no difference shown"
    told = "5 seeds cannot show any difference at 5% over 2 comparisons: take 7 or more"
    assert told in row.power
    assert detectable(5) == math.inf


def test_a_verdict_needs_the_corrected_p() -> None:
    for shift in (100.0, -100.0):
        row = compare_groups(study(np.random.default_rng(0), 6, shift))[0]
        assert (row.p, row.corrected) == (2 / 2**6, 4 / 2**6)
        assert row.interval.low > 0 or row.interval.high < 0
        assert row.verdict == "no difference shown"


def test_the_least_difference_that_is_found_is_that_of_normal_samples() -> None:
    """In standard deviations. Six seeds find what lifts all of them with a chance of 0.8, which is
    Phi^-1(0.8^(1/6)) = 1.79; a t test needs 1.00 with 10 and 0.53 with 30.
    """
    found = [detectable(seeds, count) for seeds, count in ((6, 1), (10, 1), (10, 4), (30, 1))]
    assert found == pytest.approx([1.80, 1.02, 1.39, 0.54], abs=0.005)


def test_every_group_is_set_against_the_first_in_every_measure() -> None:
    accuracies = {"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 3.5], "c": [4.0, 4.0, 8.0]}
    nets = {name: [10 * one for one in values] for name, values in accuracies.items()}
    groups = {name: {"test_accuracy": accuracies[name], "net": nets[name]} for name in accuracies}
    rows = compare_groups(groups)
    differences = {"b": (1.0, 0.0, -0.5), "c": (3.0, 2.0, 4.0)}
    assert [row[:4] for row in rows] == [
        (name, "a", measure, tuple(scale * one for one in differences[name]))
        for measure, scale in (("test_accuracy", 1), ("net", 10))
        for name in ("b", "c")
    ]
    # ranks of 0, 0.5 and 1 are 1, 2 and 3, and the 0 has no sign; all of c lie above
    assert [(row.p, row.wins) for row in rows] == [(1.0, 1), (0.25, 3)] * 2
    assert [row.corrected for row in rows] == [1.0] * 4
    assert [row.comparisons for row in rows] == [4] * 4
    told = "3 seeds cannot show any difference at 5% over 4 comparisons: take 8 or more"
    assert rows[0].power == told
    many = [0.0, 1.0] * 5
    both = {"a": [0.0] * 10, "b": many}
    row = compare_groups({name: dict.fromkeys(MEASURES, both[name]) for name in both})[0]
    assert (row.wins, row.spread) == (5, pytest.approx(math.sqrt(2.5 / 9)))
    effect = row.spread * detectable(10, 2)
    told = f"10 seeds find a difference of {effect:.2f} points in 80% of studies; smaller"
    assert row.power == f"{told} ones stay open"


def test_a_row_says_what_was_found() -> None:
    rows = compare_groups(study(np.random.default_rng(1), 12, -5.0))
    assert [row[:3] for row in rows] == [("b", "a", "test_accuracy"), ("b", "a", "net")]
    row = rows[0]
    differences = np.array(row.differences)
    assert (row.verdict, row.wins, row.comparisons) == ("below", 0, 2)
    assert row.interval.mean == pytest.approx(differences.mean())
    low, high = stats.t.interval(0.95, 11, differences.mean(), stats.sem(differences))
    assert (row.interval.low, row.interval.high) == (pytest.approx(low), pytest.approx(high))
    assert row.effect == pytest.approx((1 - 3 / 43) * differences.mean() / differences.std(ddof=1))
    assert row.power == ""
    counts = {"a": 12, "b": 11}
    with pytest.raises(ValueError, match=r"^groups of \[11, 12\] seeds cannot be paired$"):
        compare_groups({name: dict.fromkeys(MEASURES, [0.0] * n) for name, n in counts.items()})
