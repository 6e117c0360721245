"""What the tables say of known numbers: means, intervals, pairs, ratios, verdicts."""

import math

import numpy as np
import pytest

from benchmarks.eps import paired
from benchmarks.eps_config import EpsConfig
from benchmarks.family_tables import NAMES, family_lines
from benchmarks.learning import judge
from benchmarks.price_tables import measure
from benchmarks.proof_statistics import Comparison, comparisons, levels, main_runs
from benchmarks.timing import COLUMNS, Timing, in_columns, in_turns
from esper_soa.training.results.statistics import Interval


def player(level: float, size: float) -> dict:
    """Ten random seeds of two hosts, a point above and below their mean, which is `level` plus a
    tenth of the seed's number.
    """
    accuracy = [[level + n / 10 - 1, level + n / 10 + 1] for n in range(10)]
    return {
        "accuracy": accuracy,
        "validation_accuracy": accuracy,
        "net": [[value - size / 10_000 for value in hosts] for hosts in accuracy],
        "parameters": [[size - 100, size + 100] for _ in range(10)],
        "train_flop": [[size * 1e6, size * 1e6] for _ in range(10)],
    }


def against(control: dict, learned: dict, name: str = "accuracy") -> Comparison:
    """The learned policy less a control in one measure."""
    found = comparisons({"learned": learned, "wait": control})
    return next(row for row in found if row.measure == name)


# --- the proof


def test_a_level_is_the_interquartile_mean_of_the_means_of_seeds_and_the_plain_mean_of_sizes() -> (
    None
):
    (level,) = levels({"learned": player(70.0, 5000.0)})
    assert level.means["accuracy"].mean == pytest.approx(70.45)  # 70.2 ... 70.7 of 70.0 ... 70.9
    assert level.means["net"].mean == pytest.approx(69.95)
    assert level.sizes["parameters"].mean == 5000
    # h = 6; winsorised 70.2 three times, 70.3 ... 70.6, 70.7 three times: SSD 6 * 0.0625 + 2 *
    # 0.0225 + 2 * 0.0025
    reach = 2.570582 * math.sqrt(0.425 / 30)
    assert level.means["accuracy"].low == pytest.approx(70.45 - reach, rel=1e-6)


def test_pairs_of_seeds_are_compared_learned_less_control() -> None:
    row = against(player(69.5, 6000.0), player(70.0, 5000.0))
    assert row.difference == pytest.approx((0.5, 0.5, 0.5))  # the same for every seed
    # of 100 pairs 50 + 15 are above in tenths, 5 are tied
    tenths = range(10)
    above = sum((a + 5 > b) + 0.5 * (a + 5 == b) for a in tenths for b in tenths)
    assert row.improvement.mean == pytest.approx(above / 100)
    assert (row.seeds_won, row.seeds, row.hosts_won, row.hosts) == (10, 10, 20, 20)
    assert row.shares == pytest.approx({"parameters": 5 / 6, "train_flop": 5 / 6})
    net = against(player(69.5, 6000.0), player(70.0, 5000.0), "net")
    assert net.difference.mean == pytest.approx(0.5 + 0.1)


def test_hosts_and_seeds_won_are_strictly_ahead() -> None:
    mine = player(70.0, 5000.0)
    theirs = player(70.0, 5000.0)
    mine["accuracy"] = [[80.0, 60.5 + n] for n in range(10)]  # means 70.25 + n / 2
    # the last mean is as high as ours
    theirs["accuracy"] = [[80.0, 60.0 + n] for n in range(9)] + [[80.5, 69.0]]
    row = against(theirs, mine)
    assert row.seeds_won == 9
    assert row.hosts_won == 10  # the first host is tied nine times and lost once


@pytest.mark.parametrize(
    ("low", "high", "p", "verdict"),
    [
        (0.1, 2.0, 0.009, "ahead"),
        (-2.0, -0.1, 0.009, "behind"),
        (-0.1, 2.0, 0.009, "no difference shown"),
        (0.1, 2.0, 0.011, "no difference shown"),
        (-2.0, -0.1, 0.011, "no difference shown"),
    ],
)
def test_a_verdict_needs_the_paired_interval_and_the_test(
    low: float, high: float, p: float, verdict: str
) -> None:
    interval = Interval((low + high) / 2, low, high)
    row = Comparison("wait", "accuracy", interval, interval, p, interval, 0, 10, 0, 80, {})
    assert row.verdict == verdict


def test_ten_seeds_that_are_all_above_all_others_are_ahead_with_the_least_p() -> None:
    row = against(player(67.0, 5000.0), player(70.0, 5000.0))
    assert row.p == pytest.approx(2 / math.comb(20, 10))
    assert row.verdict == "ahead"


def test_main_runs_are_paired_over_hosts_and_over_seeds() -> None:
    found = main_runs([[71.0, 73.0], [69.0, 71.0]], [[70.0, 70.0], [70.0, 70.0]])
    assert found.differences == [2.0, 0.0]
    assert found.ahead == 1  # a seed without a difference is not ahead
    # 1, 3, -1, 1: mean 1, variance 8 / 3; the quantile of 3 degrees of freedom at 0.975 is 3.182446
    reach = 3.182446 * math.sqrt(8 / 3 / 4)
    assert found.over_hosts == pytest.approx((1.0, 1 - reach, 1 + reach), rel=1e-6)
    # of 1 degree of freedom, error 1
    assert found.over_seeds.high == pytest.approx(1 + 12.706205, rel=1e-6)


# --- learning, the family, prices


def test_a_policy_that_is_always_ahead_has_the_smallest_p_of_five_against_five() -> None:
    scripted = [19.0, 22.0, 21.0, 24.0, 23.0]
    nets = [
        {"ppo": 20.0 + n, "heuristic": scripted[n], "random": 5.0 - n, "wait": 10.0}
        for n in range(5)
    ]
    rows = {row.policy: row for row in judge([{"net": net, "accuracy": net} for net in nets])}
    # two of the 10 choose 5 ways to rank the learned policy
    assert rows["random"].p == pytest.approx(2 / 252)
    assert rows["random"].net.mean == 3.0  # the middle three of 5, 4, 3, 2, 1
    assert (rows["random"].wins, rows["heuristic"].wins) == (5, 3)
    assert rows["ppo"].p is None


def test_the_tables_say_how_far_the_policy_comes() -> None:
    """Two random seeds: 3 and 5 points, the single schedule 1 and 1. In the first the best schedule
    of each env has 9, and when it is played again 5 where the single one has 1.
    """
    scores = dict.fromkeys(NAMES, [2.0, 2.0])
    scores |= {"learned": [3.0, 5.0], "single": [1.0, 1.0]}
    held_out = scores | {"oracle": [9.0], "repeated": [5.0], "single_repeated": [1.0]}
    region = {"prices": 1, "rate": 0, "best": "no growth", "training": 4, "held_out": 5}
    record = {
        "schedule": "norm in r0c2 at 1",
        "curve": {"25": {"accuracy": [20.0, 22.0], "growth": [1.0, 1.5]}},
        "scores": {"held_out": held_out, "beyond": scores},
        "classes": [(1.0, 3.0), 0.03],
        "envs": 7,
        "regions": [region | {"score": 2.0, "single": 1.5}],
    }
    text = "\n".join(family_lines(record))
    assert "| learned policy | 4.00 [-8.71, 16.71] | +3.00 [-9.71, +15.71] | 2 of 2 |" in text
    assert "comes 25% and 50% of the way" in text
    assert "| 1 to 3 | at most 0.03 | no growth | 2.00 | 1.50 | 4, 5 |" in text


def test_the_measure_is_the_mean_accuracy_over_budgets() -> None:
    costs = np.array([[1.0, 1.0], [4.0, 4.0]])
    # 20 within budgets below 4, two thirds of the way from 1 to 8, and 30 beyond
    assert measure(costs, np.array([[20.0, 20.0], [30.0, 30.0]])) == pytest.approx(70 / 3)
    # nothing is cheap enough below 4: chance
    assert measure(costs[1:], np.array([[40.0, 40.0]])) == pytest.approx(20.0)
    # the first seed takes the network that was best with the second, and the other way round
    accuracies = np.array([[20.0, 25.0], [40.0, 10.0]])
    assert measure(np.ones((2, 2)), accuracies) == pytest.approx([20.0, 10.0])


# --- speed


class Timed:
    """A side whose timings are written down beforehand."""

    def __init__(self, seconds: list[float], envs: int) -> None:
        self.cfg = EpsConfig(envs=envs)
        self.timings = [Timing(dict.fromkeys(COLUMNS[:3], whole / 3), {}) for whole in seconds]


def test_ratios_are_of_the_same_turn() -> None:
    assert list(in_turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]
    # Turns 3/1, 4/2, 10/5: ratios 3, 2, 2, not the ratio of the medians, 4/2.
    top = Timed([3.0, 4.0, 10.0], envs=4)
    bottom = Timed([1.0, 2.0, 5.0], envs=2)
    found = paired(bottom, top)  # type: ignore[arg-type]
    assert found["all"] == pytest.approx({"median": 2, "low": 2, "high": 3})
    assert paired(bottom, top, per_env=True)["all"]["median"] == pytest.approx(1)  # type: ignore[arg-type]


def test_what_no_phase_has_counted_belongs_to_the_last_column() -> None:
    phases = {"training": 1.0, "data": 2.0, "validation": 4.0, "reset": 8.0, "files": 16.0}
    work = {"training": 3.0, "validation": 4.0}
    assert in_columns(phases, 40.0) == work | {"policy and state machine": 24.0 + 9.0}
