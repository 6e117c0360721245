"""Statistics of small samples: intervals of means and of shares of pairs, and exact tests of ranks.

The intervals of means are those of samples whose means are normal: of six normal values they hold
the mean with the confidence asked for, where a percentile bootstrap asked for 95 % holds it in 86
%; of six exponential ones they hold it in 89. scipy's exact tests stand no ties, but by playing all
permutations, which are too many from 20 values on: hence the two here. Needs no torch.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

HALVINGS = 60  # of a bracket in [0, 1] that holds a bound: more than a float can tell apart


class Interval(NamedTuple):
    """A mean and the bounds that hold it with the confidence asked for."""

    mean: float
    low: float
    high: float

    @property
    def has_bounds(self) -> bool:
        """Whether the bounds say something: one value has none, and equal values have no spread."""
        return math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """The mean and t interval (Student 1908) of `values`: n - 1 degrees of freedom, s / sqrt(n).

    One value says nothing of its spread: its interval is infinite. Equal values give a point.
    """
    return _trimmed(values, 0, confidence)


def difference_interval(
    values: Sequence[float], others: Sequence[float], confidence: float
) -> Interval:
    """The mean of values[i] - others[i] with its interval; both of one length, paired by place."""
    pairs = zip(values, others, strict=True)
    return mean_interval([value - other for value, other in pairs], confidence)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of what is left when a quarter of the values, rounded down, is cut off each end."""
    cut = len(values) // 4
    return float(np.sort(np.asarray(values, dtype=np.float64))[cut : len(values) - cut].mean())


def iqm_interval(values: Sequence[float], confidence: float) -> Interval:
    """The interquartile mean of `values` and the t interval of a trimmed mean."""
    return _trimmed(values, len(values) // 4, confidence)


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
    ranks = list(zip(_doubled_ranks([abs(one) for one in differences]), differences, strict=True))
    signed = [rank for rank, one in ranks if one != 0]
    return _two_sided(sum_shares(signed), sum(rank for rank, one in ranks if one > 0))


def sum_shares(ranks: Sequence[int]) -> np.ndarray:
    """The share of all ways to choose some of the `ranks`, by the sum of those that are chosen."""
    shares = np.ones(1)
    for rank in ranks:
        shares = (np.pad(shares, (0, rank)) + np.pad(shares, (rank, 0))) / 2
    return shares


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the ranks from 1, tied values each with the mean of theirs: whole numbers."""
    numbers = np.asarray(values, dtype=np.float64)
    ordered = np.sort(numbers)
    return (ordered.searchsorted(numbers) + ordered.searchsorted(numbers, "right") + 1).tolist()


def _two_sided(ways: np.ndarray, found: int) -> float:
    """Twice the share of the `ways`, by their sums, that lie as far out as the sum `found`."""
    tail = min(ways[: found + 1].sum(), ways[found:].sum())
    return min(1.0, 2 * float(tail / ways.sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values of a family of tests, raised to bound any false finding's chance (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    found = np.empty(len(p_values))
    found[order] = np.maximum.accumulate(raised.clip(max=1.0))
    return found.tolist()


def improvement_interval(
    values: Sequence[float], others: Sequence[float], confidence: float
) -> Interval:
    """The probability of improvement, P(a value > another's) (Agarwal et al. 2021), interval too.

    Estimated by the share of all pairs of a value and another, a tie counting half: U / (m n) of
    Mann and Whitney. The interval is method 5 of Newcombe (2006): all probabilities from which the
    estimate lies no farther than so many of the standard errors that they imply (Hanley and McNeil
    1982). It holds at ten against ten, 95 to 97 % where it asks for 95, near 0 and 1 too, where a t
    interval over the shares of pairs holds 57 %; of samples that are paired and correlate it holds
    more. Both samples must have at least one value.
    """
    mine = np.asarray(values, dtype=np.float64)[:, None]
    theirs = np.asarray(others, dtype=np.float64)
    share = float(((mine > theirs) + 0.5 * (mine == theirs)).mean())
    reach = NormalDist().inv_cdf((1 + confidence) / 2)
    more = (len(values) + len(others)) / 2 - 1  # the exponents' mean for the counts
    bounds = []
    for without in (0.0, 1.0):
        within = share
        for _ in range(HALVINGS):
            middle = (within + without) / 2
            spread = 1 + more * ((1 - middle) / (2 - middle) + middle / (1 + middle))
            error = math.sqrt(middle * (1 - middle) * spread / (len(values) * len(others)))
            near = abs(share - middle) <= reach * error
            within, without = (middle, without) if near else (within, middle)
        bounds.append(within)
    return Interval(share, *bounds)


def _trimmed(values: Sequence[float], cut: int, confidence: float) -> Interval:
    """The mean without `cut` values at each end, and its t interval (Tukey and McLaughlin 1963).

    The h values that are left decide: h - 1 degrees of freedom, and as error sqrt(SSD / (h (h -
    1))), where SSD is the sum of squared deviations of the winsorised sample, whose cut values are
    replaced by the nearest that is left.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    left = ordered[cut : len(ordered) - cut]
    mean = float(left.mean())
    count = len(left)
    if count < 2:
        return Interval(mean, -np.inf, np.inf)
    winsorised = ordered.clip(left[0], left[-1])
    error = np.sqrt(((winsorised - winsorised.mean()) ** 2).sum() / (count * (count - 1)))
    reach = float(stdtrit(count - 1, (1 + confidence) / 2) * error)
    return Interval(mean, mean - reach, mean + reach)
