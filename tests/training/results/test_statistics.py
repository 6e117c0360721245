"""Intervals and tests of small samples: worked out by hand, and as scipy has them."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import PermutationMethod, mannwhitneyu

from benchmarks.intervals import improvement_interval, iqm_interval
from esper_soa.lab.rank_tests import mann_whitney
from esper_soa.training.results.statistics import Interval, difference_interval, mean_interval


def test_the_interval_of_a_mean_is_students() -> None:
    # mean 3.5, variance 17.5 / 5 = 3.5, error sqrt(3.5 / 6); the quantile of 5 degrees of freedom
    # at 0.975 is 2.570582
    reach = 2.570582 * math.sqrt(3.5 / 6)
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.95)
    assert interval == pytest.approx((3.5, 3.5 - reach, 3.5 + reach), rel=1e-6)
    # to the bit, whatever order the values come in
    assert mean_interval([0.1, 0.2, 0.3], 0.9) == mean_interval([0.3, 0.2, 0.1], 0.9)


def test_the_interval_of_an_interquartile_mean_is_that_of_a_trimmed_one() -> None:
    # 3 4 5 6 are left; winsorised 3 3 3 4 5 6 6 6: squared deviations from 4.5 sum to 14, error
    # sqrt(14 / (4 * 3)); the quantile of 3 degrees of freedom at 0.95 is 2.353363
    reach = 2.353363 * math.sqrt(14 / 12)
    interval = iqm_interval([8.0, 3.0, 1.0, 5.0, 1000.0, 2.0, 4.0, 6.0][::-1], 0.9)
    assert interval == pytest.approx((4.5, 4.5 - reach, 4.5 + reach), rel=1e-6)


def test_equal_values_give_a_point_and_one_alone_says_nothing_of_its_spread() -> None:
    for interval in (mean_interval, iqm_interval):
        assert interval([3.0] * 5, 0.9) == (3.0, 3.0, 3.0)
        assert interval([5.0], 0.9) == (5.0, -math.inf, math.inf)


def test_bounds_that_say_nothing_are_not_in_the_text_of_an_interval() -> None:
    assert Interval(2.434, 1.1, 3.76).text(unit="points") == "+2.43 points [+1.10, +3.76]"
    assert Interval(8134.6, 81.0, 2e4).text(".0f") == "8135 [81, 20000]"
    assert mean_interval([3.0] * 5, 0.9).text() == "+3.00"
    assert mean_interval([3.0], 0.9).text() == "+3.00"
    nearly = difference_interval([60.1, 70.3, 80.2], [60.1, 70.3 + 1e-9, 80.2], 0.95)
    assert nearly.low < 0 < nearly.high
    assert nearly.text() == "+0.00"
    assert Interval(math.nan, math.nan, math.nan).text() == "+nan"
    assert Interval(1.0, 0.5, math.inf).text(".1f") == "1.0"


def test_pairs_cancel_what_both_share() -> None:
    # every pair differs by one half, however much the pairs differ among themselves
    assert difference_interval([10.5, 0.5, 90.5], [10.0, 0.0, 90.0], 0.95) == (0.5, 0.5, 0.5)


def test_the_interquartile_mean_cuts_a_quarter_off_each_end() -> None:
    # one of five at each end: mean of 1, 2, 3
    assert iqm_interval([100.0, 3.0, 1.0, -50.0, 2.0], 0.95).mean == 2.0
    assert iqm_interval([5.0, 7.0, -9.0], 0.95).mean == 1.0  # nothing to cut: (5 + 7 - 9) / 3


# --- the test of Mann and Whitney


def test_the_exact_p_counts_the_ways_to_share_out_the_ranks() -> None:
    assert mann_whitney([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)
    assert mann_whitney([4.0, 5.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(2 / 20)
    assert mann_whitney([1.0, 2.0, 4.0], [3.0, 5.0, 6.0]) == pytest.approx(4 / 20)
    assert mann_whitney([1.0, 4.0], [2.0, 3.0]) == 1.0
    # ranks 1.5, 1.5, 3.5, 3.5: one of the six ways gives the low two, one the high two
    assert mann_whitney([1.0, 1.0], [2.0, 2.0]) == pytest.approx(2 / 6)
    assert mann_whitney([7.0] * 10, [7.0] * 10) == 1.0


@pytest.mark.parametrize(("size", "others"), [(10, 10), (4, 7), (6, 3)])
def test_without_ties_it_is_scipys_exact_p(size: int, others: int) -> None:
    draws = np.random.default_rng(size)
    for shift in (0.0, 0.7, 2.0):
        mine = draws.normal(shift, 1.0, size)
        theirs = draws.normal(0.0, 1.0, others)
        assert mann_whitney(mine, theirs) == pytest.approx(
            mannwhitneyu(mine, theirs, method="exact").pvalue
        )


def test_with_ties_it_is_scipys_p_of_all_permutations() -> None:
    draws = np.random.default_rng(3)
    for _ in range(5):
        mine = draws.integers(0, 4, 6).tolist()
        theirs = draws.integers(1, 5, 5).tolist()
        everything = PermutationMethod(n_resamples=np.inf)
        assert mann_whitney(mine, theirs) == pytest.approx(
            mannwhitneyu(mine, theirs, method=everything).pvalue
        )


# --- the probability of improvement


def test_the_probability_of_improvement_is_the_share_of_pairs_with_ties_as_halves() -> None:
    assert improvement_interval([3.0, 1.0], [2.0, 1.0], 0.95).mean == pytest.approx(2.5 / 4)
    assert improvement_interval([5.0] * 10, [5.0] * 10, 0.95).mean == 0.5
    mine, theirs = np.random.default_rng(5).normal(0.5, 1.0, (2, 10)).tolist()
    u = mannwhitneyu(mine, theirs).statistic
    assert improvement_interval(mine, theirs, 0.95).mean == pytest.approx(u / 100)


def test_its_bounds_lie_as_many_standard_errors_off_as_the_confidence_asks_for() -> None:
    mine = [1.0, 3.0, 5.0, 7.0, 9.0, 10.0, 12.0]
    theirs = [0.0, 2.0, 4.0, 6.0, 8.0]
    found = improvement_interval(mine, theirs, 0.95)
    # Hanley and McNeil 1982 with (7 + 5) / 2 - 1 in place of both counts less one
    for bound in found[1:]:
        spread = 1 + 5 * (1 - bound) / (2 - bound) + 5 * bound / (1 + bound)
        assert abs(found.mean - bound) == pytest.approx(
            1.959964 * math.sqrt(bound * (1 - bound) * spread / 35)
        )
    assert 0 < found.low < found.mean < found.high < 1
    narrow = improvement_interval(mine, theirs, 0.5)
    assert found.low < narrow.low < narrow.high < found.high


def test_ten_that_are_all_above_ten_others_do_not_prove_certainty() -> None:
    above = [10.0 + n for n in range(10)]
    below = [float(n) for n in range(10)]
    assert improvement_interval(above, below, 0.95) == pytest.approx((1.0, 0.8002, 1.0), abs=1e-4)
    assert improvement_interval(below, above, 0.95) == pytest.approx((0.0, 0.0, 0.1998), abs=1e-4)


@pytest.mark.parametrize(
    ("chance", "alike", "most"), [(0.5, 0.0, 0.98), (0.7, 0.9, 1.0), (0.98, 0.0, 0.98)]
)
def test_of_ten_against_ten_it_holds_what_it_claims(
    chance: float, alike: float, most: float
) -> None:
    """Normal values, pairs correlated by `alike`; a t interval over shares holds 57 % at 0.98."""
    draws = np.random.default_rng(11)
    shift = NormalDist().inv_cdf(chance) * math.sqrt(2)
    theirs = draws.normal(0.0, 1.0, (1000, 10))
    mine = shift + alike * theirs + math.sqrt(1 - alike**2) * draws.normal(0.0, 1.0, (1000, 10))
    found = [improvement_interval(*pair, 0.95) for pair in zip(mine, theirs, strict=True)]
    held = sum(one.low <= chance <= one.high for one in found) / len(found)
    assert 0.93 <= held <= most
