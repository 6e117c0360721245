"""Intervals and tests of small samples: worked out by hand, as scipy has them, and on simulated
studies of known truth.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import (
    difference_interval,
    improvement_interval,
    iqm_interval,
    mean_interval,
)
from esper_soa.training.results.statistics import (
    Estimate,
    Interval,
    detectable,
    estimate,
    holm,
    sample_variance,
    source_words,
)


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


# --- test samples as a second source of chance


def test_the_error_over_rows_and_samples_is_that_of_a_crossed_layout() -> None:
    # Row means 3 and 1, sample means 4.5, 0 and 1.5, so that the mean squares of rows, samples and
    # residual are 6, 10.5 and 1.5: variance (6 + 9) / 6, degrees of freedom 15^2 / 6^2.
    answers = np.array([[6.0, 0.0, 3.0], [3.0, 0.0, 0.0]])
    found = estimate([3.0, 1.0], 0.95, answers)
    assert (found.error, found.degrees) == pytest.approx((2.5**0.5, 6.25))
    assert found.sampled
    reach = stats.t.ppf(0.975, 6.25) * 2.5**0.5
    assert found.interval == pytest.approx((2.0, 2.0 - reach, 2.0 + reach))
    assert found.p == pytest.approx(2 * stats.t.sf(2.0 / 2.5**0.5, 6.25))
    assert source_words("hosts", found.sampled and "images") == "hosts and test images"
    # what no sample changes moves the mean and the spread of rows alone
    shifted = estimate([2.0, 1.0], 0.95, answers)
    assert (shifted.interval.mean, shifted.error) == (1.5, pytest.approx((0.25 + 1.5) ** 0.5))
    # where samples vary no more than the residual, rows are all there is, as without answers
    noise = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])
    alone = estimate([1.0, 0.0], 0.95)
    assert estimate([1.0, 0.0], 0.95, noise)[:4] == alone[:4]
    assert (alone.degrees, alone.sampled) == (1.0, False)
    assert source_words("hosts", alone.sampled and "images") == "hosts"


def test_rows_that_have_met_other_samples_add_their_variances_by_their_shares() -> None:
    rows = [[6.0, 0.0, 3.0], [3.0, 0.0, 0.0]]
    apart = np.full((3, 6), np.nan)
    apart[:2, :3] = rows
    apart[2, 3:] = [2.0, 4.0, 6.0]  # a single row: 4 / 3
    assert sample_variance(np.array(rows)) == pytest.approx(1.5)
    assert sample_variance(apart) == pytest.approx(1.5 * (2 / 3) ** 2 + 4 / 3 * (1 / 3) ** 2)
    assert sample_variance(np.array([[1.0], [3.0]])) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_is_beside_0_exactly_where_p_is_small(seed: int) -> None:
    draws = np.random.default_rng(seed)
    answers = draws.normal(0.3, 1.0, (5, 40)) + draws.normal(0.0, 0.6, 40)
    found = estimate(answers.mean(1), 0.95, answers)
    assert (found.p < 0.05) == (found.interval.low > 0 or found.interval.high < 0)
    edge = estimate(answers.mean(1), 1 - found.p, answers).interval
    assert min(abs(edge.low), abs(edge.high)) == pytest.approx(0.0, abs=1e-9)


def simulated(
    draws: np.random.Generator, rows: int, samples: int, images: float
) -> tuple[np.ndarray, float]:
    """Differences in percent of binary answers of two hosts each, [rows, samples], and their mean.

    An answer is right with a normal chance: gain of a side, effects of row, host, image, of image
    and row on a side (`images`), and noise. Latent variances add up, so the mean is known.
    """
    levels = np.array([1.3, 1.1])
    spread = {
        (1, rows, 1, 1): 0.3,
        (2, rows, 1, 1): 0.1,
        (2, rows, 2, 1): 0.1,
        (1, 1, 1, samples): 1.0,
        (2, 1, 1, samples): images,
        (2, rows, 2, samples): 1.0,
    }
    latent = sum(size * draws.normal(size=shape) for shape, size in spread.items())
    right = latent + levels[:, None, None, None] > 0
    deviation = math.sqrt(sum(size**2 for size in spread.values()))
    chances = [NormalDist().cdf(level / deviation) for level in levels]
    return 100 * np.subtract(*right.mean(2)), 100 * (chances[0] - chances[1])


@pytest.mark.parametrize(
    ("rows", "samples", "images", "of_rows"),
    [(4, 100, 0.05, 0.98), (6, 300, 0.5, 0.95), (10, 100, 0.5, 0.9)],
)
def test_intervals_of_binary_answers_hold_what_they_claim(
    rows: int, samples: int, images: float, of_rows: float
) -> None:
    """In 93 to 97 % of studies, also where those over rows alone hold less than `of_rows`."""
    draws = np.random.default_rng(rows)
    held = np.zeros(2)
    for _ in range(1000):
        answers, mean = simulated(draws, rows, samples, images=images)
        values = answers.mean(1).tolist()
        found = estimate(values, 0.95, answers).interval, estimate(values, 0.95).interval
        held += [interval.low <= mean <= interval.high for interval in found]
    assert 0.93 <= held[0] / 1000 <= 0.97
    assert held[1] / 1000 < of_rows


def test_a_mean_without_spread_is_certain_and_one_row_shows_nothing() -> None:
    assert [estimate([value] * 3, 0.95).p for value in (0.0, 2.0)] == [1.0, 0.0]
    assert estimate([2.0], 0.95)[:2] == ((2.0, -math.inf, math.inf), 1.0)
    assert math.isnan(estimate([], 0.95).interval.mean)
    same = estimate([2.0, 2.0], 0.95, np.array([[1.0, 3.0], [1.0, 3.0]]))  # samples alone vary
    assert same.interval.high - 2.0 == pytest.approx(NormalDist().inv_cdf(0.975))


def test_the_least_difference_that_is_found_is_that_of_noncentral_t() -> None:
    """In standard deviations: with a chance of 0.8, 1.00 with 10 rows and 0.53 with 30."""
    found = [
        detectable(Estimate(Interval(0, 0, 0), 1.0, rows**-0.5, rows - 1, False), level, 0.8)
        for rows, level in ((10, 0.05), (30, 0.05), (10, 0.05 / 4), (3, 0.05))
    ]
    assert found[:2] == pytest.approx([0.996, 0.529], abs=1e-3)
    draws = np.random.default_rng(0).normal(size=(20_000, 10)) + found[2]
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05 / 4).mean() == pytest.approx(
        0.8, abs=0.01
    )
    draws = np.random.default_rng(1).normal(size=(20_000, 3)) + found[3]
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(
        0.8, abs=0.01
    )
    assert detectable(estimate([1.0], 0.95), 0.05, 0.8) == math.inf


def test_holm_raises_p_values_step_by_step() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


# --- the probability of improvement


def test_the_probability_of_improvement_is_the_share_of_pairs_with_ties_as_halves() -> None:
    assert improvement_interval([3.0, 1.0], [2.0, 1.0], 0.95).mean == pytest.approx(2.5 / 4)
    assert improvement_interval([5.0] * 10, [5.0] * 10, 0.95).mean == 0.5
    mine, theirs = np.random.default_rng(5).normal(0.5, 1.0, (2, 10)).tolist()
    u = stats.mannwhitneyu(mine, theirs).statistic
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
