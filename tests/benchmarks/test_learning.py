"""The comparison of a learned policy with scripted ones over seeds."""

import pytest

from benchmarks.learning import POLICIES, judge, table


def seed(ppo: float, heuristic: float, random: float) -> dict:
    net = {"ppo": ppo, "heuristic": heuristic, "random": random, "wait": 10.0}
    return {"net": net, "accuracy": {name: value + 1 for name, value in net.items()}}


SEEDS = [seed(20.0 + n, [19.0, 22.0, 21.0, 24.0, 23.0][n], 5.0 - n) for n in range(5)]


def test_a_policy_that_is_always_ahead_has_the_smallest_p_of_five_against_five() -> None:
    random = {row.policy: row for row in judge(SEEDS)}["random"]
    # two of the 10 choose 5 ways to rank the learned policy
    assert random.p == pytest.approx(2 / 252)
    assert random.wins == 5
    assert random.net.mean == 3.0  # the middle three of 5, 4, 3, 2, 1


def test_a_policy_that_is_as_good_is_not_told_apart() -> None:
    heuristic = {row.policy: row for row in judge(SEEDS)}["heuristic"]
    assert heuristic.wins == 3  # 20 > 19, 21 < 22, 22 > 21, 23 < 24, 24 > 23
    assert heuristic.p is not None
    assert heuristic.p > 0.5


def test_the_table_has_a_row_for_every_policy_and_no_p_for_the_learned_one() -> None:
    lines = table(SEEDS)[:-1]
    assert len(lines) == 2 + len(POLICIES)
    assert lines[2].startswith("| learned (ppo) | 23.00 | 22.00 [")
    assert lines[2].endswith("|  |  |")
