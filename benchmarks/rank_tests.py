"""Exact tests of ranks.

scipy's exact tests take ties by trying all permutations alone, which are too many from 20 values
on. Needs no torch.
"""

from collections.abc import Sequence

import numpy as np


def mann_whitney(values: Sequence[float], others: Sequence[float]) -> float:
    """The two-sided p of the rank sum test (Mann and Whitney 1947), exact, with ties too.

    The ranks of both samples together, tied values each with the mean of theirs, are shared out
    between the samples in all ways, each as likely as the other: p is twice the share of ways whose
    rank sum lies as far out as the one found. Without ties this is the tabulated distribution of U.
    """
    ranks = _doubled_ranks([*values, *others])
    ways = np.zeros((len(values) + 1, sum(ranks) + 1))  # by ranks taken, then their sum
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    return _two_sided(ways[-1], sum(ranks[: len(values)]))


def signed_rank(differences: Sequence[float]) -> float:
    """The exact two-sided p of the signed rank test (Wilcoxon 1945) of pairs, with ties too.

    Every difference that is not 0 is as likely to be of either sign: p is twice the share of all
    ways to give them signs whose sum of positive ranks lies as far out as the one found. Ranks are
    those of the sizes, tied ones each with the mean of theirs; differences of 0 take ranks and no
    sign (Pratt 1959). 1 where all are 0.
    """
    ranks = np.array(_doubled_ranks([abs(value) for value in differences]))
    signs = np.sign(differences)
    return _two_sided(sum_shares(ranks[signs != 0].tolist()), int(ranks[signs > 0].sum()))


def sum_shares(ranks: Sequence[int]) -> np.ndarray:
    """The share of all ways to choose some of the `ranks`, by the sum of those that are chosen."""
    shares = np.ones(1)
    for rank in ranks:
        shares = (np.pad(shares, (0, rank)) + np.pad(shares, (rank, 0))) / 2
    return shares


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the ranks from 1, tied values each with the mean of theirs: whole numbers."""
    numbers = np.asarray(values)
    ordered = np.sort(numbers)
    return (ordered.searchsorted(numbers) + ordered.searchsorted(numbers, "right") + 1).tolist()


def _two_sided(ways: np.ndarray, total: int) -> float:
    """Twice the share of the `ways`, by their sums, that lie as far out as the sum `total`."""
    tail = min(ways[: total + 1].sum(), ways[total:].sum())
    return min(1.0, 2 * float(tail / ways.sum()))
