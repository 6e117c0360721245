"""Exact tests of ranks, as scipy has them and by their definition."""

import itertools

import numpy as np
import pytest
from scipy import stats
from scipy.stats import PermutationMethod, mannwhitneyu

from benchmarks.rank_tests import mann_whitney, signed_rank


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
