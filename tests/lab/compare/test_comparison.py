"""Comparisons of groups over seeds hold what they promise, on simulated studies of known truth."""

import math

import numpy as np
import pytest
from scipy import stats

from esper_soa.lab.compare.comparison import MEASURES, compare_groups
from esper_soa.training.results.statistics import estimate


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


def test_a_difference_is_found_with_the_power_that_is_told() -> None:
    rng = np.random.default_rng(7)
    missed = [compare_groups(study(rng, 7, 0.0))[0] for _ in range(200)]
    shift = np.sqrt(np.mean([row.least**2 for row in missed]))  # of the spread that studies have
    found = [compare_groups(study(rng, 7, shift))[0] for _ in range(400)]
    # both measures are the same here, so that Holm asks both for its first step
    share = np.mean([row.corrected < 0.05 for row in found])
    assert share == pytest.approx(0.8, abs=0.06)  # three standard errors


def test_a_single_random_seed_shows_nothing() -> None:
    row = compare_groups(study(np.random.default_rng(0), 1, 100.0))[0]
    assert (row.verdict, row.p, row.corrected) == ("no difference shown", 1.0, 1.0)
    assert row.power == "a single random seed cannot show any difference: take 2 or more"


def test_a_verdict_needs_the_corrected_p() -> None:
    steady = [0.0, 1.0, 2.0]
    values = {"a": [0.0] * 3, "b": [2.0, 3.0, 4.5], "c": [50.0, 51.0, 52.0], "d": steady}
    rows = compare_groups({name: dict.fromkeys(MEASURES, values[name]) for name in values})
    b, c, d = rows[:3]
    assert b.p < 0.05 < b.corrected
    assert b.interval.low > 0
    assert [row.verdict for row in (b, c, d)] == ["no difference shown", "above"] + [b.verdict]


def test_test_samples_count_where_both_groups_have_met_as_many() -> None:
    rng = np.random.default_rng(2)
    means = {name: rng.normal(50.0, 20.0, (3, 9)) + 10 * rng.normal(size=9) for name in "ab"}
    means["c"] = means["b"][:, :5]
    groups = {name: dict.fromkeys(MEASURES, rows.mean(1).tolist()) for name, rows in means.items()}
    groups["b"]["net"] = [value - 1 for value in groups["b"]["net"]]
    b, c, net, _ = compare_groups(groups, means)
    wanted = estimate(b.differences, 0.95, means["b"] - means["a"])
    assert (b.interval, b.p, b.sampled) == (wanted.interval, wanted.p, True)
    assert net.interval == pytest.approx([bound - 1 for bound in wanted.interval])
    assert (c.interval, c.sampled) == (estimate(c.differences, 0.95).interval, False)
    assert b.record()["sampled"]
    assert not any(row.sampled for row in compare_groups(groups))


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
    # differences of b: mean 1 / 6, error 0.441; of c: mean 3, error 0.577
    p_values = [2 * stats.t.sf(t, 2) for t in (1 / 6 / 0.440959, 3 * math.sqrt(3))]
    assert [row.p for row in rows] == pytest.approx(p_values * 2, rel=1e-5)
    assert [row.wins for row in rows] == [1, 3] * 2
    assert [row.corrected for row in rows] == pytest.approx([1.0, 4 * p_values[1]] * 2)
    assert [row.comparisons for row in rows] == [4] * 4
    share = f"{rows[0].least:.2f} points in 80% of studies"
    told = f"3 random seeds find a difference of {share}; smaller ones stay open"
    assert rows[0].power == told


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
    with pytest.raises(ValueError, match=r"^groups of \[11, 12\] random seeds cannot be paired$"):
        compare_groups({name: dict.fromkeys(MEASURES, [0.0] * n) for name, n in counts.items()})
