"""Intervals of the means of small samples.

They are those of samples whose means are normal: of six normal values they hold the mean with the
confidence asked for, where a percentile bootstrap asked for 95 % holds it in 86 %; of six
exponential ones they hold it in 89. Needs no torch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit


class Interval(NamedTuple):
    """A mean and the bounds that hold it with the confidence asked for."""

    mean: float
    low: float
    high: float

    def text(self, form: str = "+z.2f", unit: str = "") -> str:
        """'+2.43 points [+1.10, +3.76]', numbers in `form`.

        Without the bounds where they are infinite or NaN, as of one value or of none, or read the
        same, as of equal values.
        """
        mean, low, high = (f"{value:{form}}" for value in self)
        mean += f" {unit}" if unit else ""
        has_bounds = math.isfinite(self.high - self.low) and low != high
        return f"{mean} [{low}, {high}]" if has_bounds else mean


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """The mean and t interval (Student 1908) of `values`: n - 1 degrees of freedom, s / sqrt(n).

    One value says nothing of its spread: its interval is infinite. Equal values give a point.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    mean = float(ordered.mean())
    count = len(ordered)
    if count < 2:
        return Interval(mean, -np.inf, np.inf)
    error = np.sqrt(((ordered - mean) ** 2).sum() / (count * (count - 1)))
    reach = float(stdtrit(count - 1, (1 + confidence) / 2) * error)
    return Interval(mean, mean - reach, mean + reach)


def difference_interval(
    values: Sequence[float], others: Sequence[float], confidence: float
) -> Interval:
    """The mean of values[i] - others[i] with its interval; both of one length, paired by place."""
    pairs = zip(values, others, strict=True)
    return mean_interval([value - other for value, other in pairs], confidence)
