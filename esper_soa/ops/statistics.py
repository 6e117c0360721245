"""Means and interquartile means with bootstrap confidence intervals, of one sample and of paired differences.

Given lists of plain numbers by the evaluation and the benchmarks. Needs numpy, no torch.
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


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of what is left when a quarter of the values, rounded down, is cut off at each end."""
    return float(_trimmed(np.asarray(values, dtype=np.float64)))


def bootstrap_iqm(values: Sequence[float], confidence: float, resamples: int, seed: int) -> Interval:
    """The interquartile mean of `values` with its percentile bootstrap interval (Agarwal et al. 2021)."""
    sample = np.asarray(values, dtype=np.float64)
    places = np.random.default_rng(seed).integers(0, len(sample), (resamples, len(sample)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(_trimmed(sample[places]), [tail, 1 - tail])
    return Interval(interquartile_mean(values), float(low), float(high))


def _trimmed(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)
