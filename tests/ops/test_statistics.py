"""Bootstrap intervals against what is known of the mean."""

import pytest

from esper_soa.ops.statistics import bootstrap_difference, bootstrap_iqm, bootstrap_mean, interquartile_mean


def test_the_interval_is_that_of_the_normal_mean() -> None:
    # 400 zeros and 400 twos: mean 1, deviation 1, standard error 1 / sqrt(800) = 0.03536; 95 %: 1 +- 1.96 * 0.03536
    interval = bootstrap_mean([0.0, 2.0] * 400, 0.95, 4000, seed=0)
    assert interval.mean == 1.0
    assert interval.low == pytest.approx(1 - 0.0693, abs=0.005)
    assert interval.high == pytest.approx(1 + 0.0693, abs=0.005)


def test_values_that_are_all_the_same_give_a_point() -> None:
    assert bootstrap_mean([3.0, 3.0, 3.0], 0.9, 100, seed=1) == (3.0, 3.0, 3.0)
    assert bootstrap_mean([5.0], 0.9, 100, seed=1) == (5.0, 5.0, 5.0)


def test_more_confidence_is_a_wider_interval_and_the_same_seed_the_same_one() -> None:
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    narrow, wide = bootstrap_mean(values, 0.5, 2500, seed=3), bootstrap_mean(values, 0.99, 2500, seed=3)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high
    assert bootstrap_mean(values, 0.5, 2500, seed=3) == narrow


def test_pairs_cancel_what_both_share() -> None:
    # every pair differs by one half, however much the pairs differ among themselves
    assert bootstrap_difference([10.5, 0.5, 90.5], [10.0, 0.0, 90.0], 0.95, 100, seed=0) == (0.5, 0.5, 0.5)


def test_samples_of_different_length_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="argument"):
        bootstrap_difference([1.0], [1.0, 2.0], 0.95, 100, seed=0)


def test_the_interquartile_mean_cuts_a_quarter_off_each_end() -> None:
    assert interquartile_mean([100.0, 3.0, 1.0, -50.0, 2.0]) == 2.0  # one of five at each end: mean of 1, 2, 3
    assert interquartile_mean([5.0, 7.0, -9.0]) == 1.0  # nothing to cut: (5 + 7 - 9) / 3


def test_its_interval_ignores_one_outlier_that_moves_the_mean() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0]
    robust, plain = bootstrap_iqm(values, 0.9, 2000, seed=0), bootstrap_mean(values, 0.9, 2000, seed=0)
    assert robust.mean == 4.5  # of 3, 4, 5, 6
    assert 1.0 <= robust.low < robust.mean < robust.high
    assert robust.high - robust.low < plain.high - plain.low
