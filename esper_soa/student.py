"""Quantiles of Student's t distribution, without scipy: what intervals of small samples are as wide
as.

Used for the intervals of the evaluation, of the benchmarks and of sampled Shapley values. Needs
nothing but Python.
"""

import functools
import math

HALVINGS = 60  # of the angle that holds the quantile: more than a float can tell apart
MOST_FREEDOM = 10_000  # from here on quantiles up to that of 0.9999 change by less than 0.04 %


@functools.lru_cache(maxsize=64)
def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t with `freedom` (at least 1) degrees of freedom at `probability`
    in (0, 1).
    """
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    freedom = min(freedom, MOST_FREEDOM)
    low = 0.0
    high = math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Probability that |t| is below sqrt(freedom) * tan(angle) (Abramowitz and Stegun 1964, 26.7.3
    and 26.7.4).
    """
    odd = freedom % 2
    square = math.cos(angle) ** 2
    term = 1.0
    total = 0.0
    for step in range(freedom // 2):
        total += term
        term *= square * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
