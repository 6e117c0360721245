"""Means of small samples with their intervals and tests, and with test samples as a second source
of chance.

Intervals are those of samples whose means are normal: of six normal values they hold the mean with
the confidence asked for, where a percentile bootstrap asked for 95 % holds it in 86 %; of six
exponential ones they hold it in 89. Needs no torch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

MOST_DEGREES = 1e9  # of freedom, beyond which t is normal


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


def source_words(rows: str, samples: str | bool) -> str:
    """'hosts and test images': the sources of chance of an interval over `rows`, and over test
    samples where their plural is given.
    """
    return f"{rows} and test {samples}" if samples else rows


class Estimate(NamedTuple):
    """The mean of some rows, with interval and test of the same t statistic: the interval for
    confidence c is beside 0 exactly where p < 1 - c.
    """

    interval: Interval
    p: float  # two-sided, of the mean being 0
    error: float  # standard error of the mean
    degrees: float  # of freedom
    sampled: bool  # whether test samples are among the sources of chance, beside the rows


def estimate(
    values: Sequence[float], confidence: float, answers: np.ndarray | None = None
) -> Estimate:
    """The mean of `values`, a number per row, as that of all rows that could have been drawn.

    answers: [R, J], what test sample j says of row r in the unit of the values, NaN where the row
    has not met it; a row's value is their mean, or differs from it by what no sample changes. Then
    the samples are drawn as well: the error is that of a layout of rows crossed with samples, its
    degrees of freedom by Hillis (2007, Statistics in Medicine 26:596). Without answers this is
    Student's t (1908): R - 1 degrees of freedom, s / sqrt(R). One row says nothing of its spread:
    its interval is infinite; of none all is NaN, with a p of 1.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    count = len(ordered)
    mean = float(ordered.mean()) if count else np.nan
    sampled = answers is not None
    if count < 2:
        reach = np.inf if count else np.nan
        unknown = Interval(mean, -reach, reach)
        return Estimate(unknown, 1.0, reach, degrees=0.0, sampled=sampled)
    of_rows = float(((ordered - mean) ** 2).sum() / (count * (count - 1)))
    variance = of_rows + (0.0 if answers is None else sample_variance(answers))
    error = math.sqrt(variance)
    share = of_rows / variance if variance else 1.0
    degrees = min((count - 1) / share**2, MOST_DEGREES) if share else MOST_DEGREES
    reach = float(stdtrit(degrees, (1 + confidence) / 2) * error)
    p = 2 * float(stdtr(degrees, -abs(mean) / error)) if error else float(mean == 0)
    interval = Interval(mean, mean - reach, mean + reach)
    return Estimate(interval, p, error, degrees=degrees, sampled=sampled)


def percent_right(right: np.ndarray, targets: int) -> np.ndarray:
    """Answers for `estimate` of the right targets [R, J] of samples with so many, -1 = not met."""
    return np.where(right < 0, np.nan, 100 / targets * right)


def paired_answers(answers: np.ndarray | None, others: np.ndarray | None) -> np.ndarray | None:
    """Answers of paired rows less the others', for `estimate`; None where one side's are not known,
    or they are to other samples, as their number says.
    """
    if answers is None or others is None or answers.shape != others.shape:
        return None
    return answers - others


def sample_variance(answers: np.ndarray) -> float:
    """The variance of the mean of all rows that comes of the choice of test samples; answers as in
    `estimate`.

    For rows that have met the same samples, with the mean squares of a two-way layout without
    replication: max(MS(samples) - MS(residual), 0) / (R J); of one row, which has no residual, all
    that its samples vary. Rows that have met others are independent of them.
    """
    total = 0.0
    known = ~np.isnan(answers)
    for where in np.unique(known, axis=0):
        part = answers[(known == where).all(1)][:, where]
        rows, samples = part.shape
        if samples < 2:
            continue
        by_sample = part.mean(0)
        spread = ((by_sample - by_sample.mean()) ** 2).sum() / (samples - 1)
        if rows > 1:
            rest = part - part.mean(1, keepdims=True) - (by_sample - by_sample.mean())
            residual = (rest**2).sum() / ((rows - 1) * (samples - 1))
            spread = max(spread - residual / rows, 0.0)
        total += spread / samples * (rows / len(answers)) ** 2
    return float(total)


def detectable(found: Estimate, significance: float, power: float) -> float:
    """The mean that a study of this error finds significant with so much power, by noncentral t."""
    if found.degrees == 0:
        return math.inf
    critical = stdtrit(found.degrees, 1 - significance / 2)
    return float(nctdtrinc(found.degrees, 1 - power, critical) * found.error)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values of a family of tests, raised to bound any false finding's chance (Holm 1979)."""
    order = np.argsort(p_values)
    raised = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(raised.clip(max=1.0))
    return adjusted.tolist()
