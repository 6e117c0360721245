"""The quantile of Student's t, against scipy and the closed forms of one and two degrees of
freedom.
"""

import math

import pytest
from scipy import stats

from esper_soa.student import student_t


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 63, 1000])
@pytest.mark.parametrize("probability", [0.01, 0.5, 0.6, 0.975, 0.99875, 0.9999])
def test_the_quantile_is_that_of_students_t(probability: float, freedom: int) -> None:
    assert student_t(probability, freedom) == pytest.approx(
        stats.t.ppf(probability, freedom), rel=1e-9, abs=1e-12
    )


def test_one_and_two_degrees_of_freedom_have_closed_forms() -> None:
    assert student_t(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475))  # Cauchy's distribution
    assert student_t(0.975, 2) == pytest.approx(0.95 / math.sqrt(2 * 0.975 * 0.025))


def test_very_many_degrees_of_freedom_are_nearly_the_normal_distribution() -> None:
    assert student_t(0.975, 10**9) == pytest.approx(1.959964, rel=2e-4)
