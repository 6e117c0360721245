"""The measure of a set of networks over budgets, and the tables of its record."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.price_curve import (
    FINAL,
    LEARNED,
    SCHEDULE,
    WIDTH,
    Job,
    measure,
    region_schedules,
    result,
    table,
)
from benchmarks.schedules import SCHEDULES

FACTS = {"cpu": "CPU", "cores": 2, "torch": "2.13"}
HEAD = {"time": "2026-11-25T22:00:00Z", "commit": "abcdef12", "machine": FACTS, "seeds": [1, 2]}


def networks(**ones: tuple[float, float, float]) -> dict[str, dict[str, list[float]]]:
    """By name: accuracy, size and FLOP, the same for two random seeds."""
    return {
        name: {"accuracy": [accuracy] * 2, "size": [size] * 2, "flop": [flop] * 2}
        for name, (accuracy, size, flop) in ones.items()
    }


def test_the_measure_is_the_mean_accuracy_over_budgets() -> None:
    costs = np.array([[1.0, 1.0], [4.0, 4.0]])
    # 20 within budgets below 4, two thirds of the way from 1 to 8, and 30 beyond
    assert measure(costs, np.array([[20.0, 20.0], [30.0, 30.0]])) == pytest.approx(70 / 3)
    # nothing is cheap enough below 4: chance
    assert measure(costs[1:], np.array([[40.0, 40.0]])) == pytest.approx(20.0)


def test_a_budget_is_served_by_what_was_best_with_the_other_random_seeds() -> None:
    costs = np.ones((2, 2))
    accuracies = np.array([[20.0, 25.0], [40.0, 10.0]])
    # the first seed takes the network that was best with the second, and the other way round
    assert measure(costs, accuracies) == pytest.approx([20.0, 10.0])


def test_the_tables_have_every_set_and_every_network() -> None:
    sets = {
        LEARNED: networks(**{"1": (30.0, 400.0, 6e6), "12": (20.0, 100.0, 1e6)}),
        SCHEDULE: networks(**{"norm in r0c1 at 1": (20.0, 100.0, 1e6)}),
        WIDTH: networks(**{"1": (18.0, 100.0, 1e6), "3": (22.0, 400.0, 4e6)}),
        FINAL: networks(**{"1": (31.0, 400.0, 8e6)}),
    }
    records = [HEAD | {"sets": sets}]
    text = "\n".join((*result(records), *table(records)))
    # 20 below 4 times the host, 30 beyond; plain hosts 18 and 22: 3.33 less
    assert "| one policy, by price | 23.33 |" in text
    assert "| plain hosts, by width | 19.33 | +4.00, p 0.5000 |" in text
    assert "| policy at price 1 | 30.00 | 4.00 | 6.00 |" in text
    assert "| plain, base channels 3 | 22.00 | 4.00 | 4.00 |" in text


def test_every_network_has_a_unit(tmp_path: Path) -> None:
    schedules = region_schedules()
    assert 1 < len(schedules) < len(SCHEDULES)
    keys = Job(7, schedules, tmp_path, ()).keys
    assert len(set(keys)) == len(keys) == 4 + 4 + len(schedules) + 5
