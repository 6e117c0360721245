"""Means with bootstrap confidence intervals, of one sample and of paired differences.

Given lists of plain numbers by the evaluation. Needs numpy, no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CHUNK = 1000  # resamples drawn at once


class Interval(NamedTuple):
    """A mean and the bounds that hold it with the confidence asked for."""

    mean: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float], confidence: float, resamples: int, seed: int) -> Interval:
    """The mean of `values` with its percentile bootstrap interval (Efron 1979).

    The same seed draws the same places, so that intervals over paired samples use the same resamples. Of one value,
    or values that are all the same, the interval is a point.
    """
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, CHUNK):
        places = generator.integers(0, len(sample), (min(CHUNK, resamples - start), len(sample)))
        means.append(sample[places].mean(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(float(sample.mean()), float(low), float(high))


def bootstrap_difference(
    values: Sequence[float], others: Sequence[float], confidence: float, resamples: int, seed: int
) -> Interval:
    """The mean of values[i] - others[i] with its interval; both of the same length, paired by place."""
    differences = [value - other for value, other in zip(values, others, strict=True)]
    return bootstrap_mean(differences, confidence, resamples, seed)
