"""The model of a round: what it adds up, and that nothing but what it names is lost."""

from dataclasses import replace

import pytest

from benchmarks.scaling import ASSUMED, Mishaps, reduction_seconds, round_seconds, simulate

COSTS = replace(ASSUMED, steps=10, passes=4)
NONE = Mishaps(spread=0.0, straggler_rate=0.0, hours_between_losses=1e12)


def test_a_rank_alone_tells_nobody_anything() -> None:
    parts = round_seconds(COSTS, 1, 8)
    assert parts["collect"] == pytest.approx(10 * (2e-3 + 8 * 45e-3))
    assert parts["update"] == pytest.approx(4 * (10e-3 + 8 * 1e-3))
    assert parts["gradient"] == parts["means"] == parts["gather"] == 0.0


def test_ranks_tell_each_other_a_gradient_and_means_per_minibatch_and_the_rollout_per_round() -> (
    None
):
    parts = round_seconds(COSTS, 4, 8)
    assert parts["collect"] == round_seconds(COSTS, 1, 8)["collect"]
    assert parts["gradient"] == pytest.approx(4 * (2 * 1e-4 + 1.5 * 300_000 * 4 / 2e9))
    assert parts["means"] == pytest.approx(4 * (2 * 1e-4 + 1.5 * 128 * 8 / 2e9))
    assert parts["gather"] == pytest.approx(0.75 * 11 * 8 * 10 * 32 / 2e9)
    assert round_seconds(COSTS, 4, 8, crowding=2.0)["collect"] == 2 * parts["collect"]


def test_a_reduction_grows_with_the_logarithm_and_its_bytes_with_a_ring() -> None:
    assert reduction_seconds(COSTS, 1, 1e9) == 0.0
    assert reduction_seconds(COSTS, 8, 0.0) == pytest.approx(3e-4)
    assert reduction_seconds(COSTS, 1000, 2e9) == pytest.approx(2.0, rel=2e-3)


def test_without_mishaps_only_reductions_are_lost() -> None:
    alone = simulate(COSTS, NONE, 1, 8)
    shared = simulate(COSTS, NONE, 64, 8)
    assert alone["efficiency"] == pytest.approx(1.0)
    assert shared["efficiency"] == pytest.approx(1.0 - shared["reduced"])
    assert shared["waiting"] == pytest.approx(0.0, abs=1e-12)


def test_every_mishap_costs_what_it_is_named_for() -> None:
    quiet = simulate(COSTS, NONE, 64, 8)
    uneven = simulate(COSTS, replace(NONE, spread=0.1), 64, 8)
    straggling = simulate(COSTS, replace(NONE, straggler_rate=0.5), 64, 8)
    lossy = simulate(COSTS, replace(NONE, hours_between_losses=10.0), 64, 8)
    assert uneven["waiting"] > 0.15
    assert straggling["waiting"] == pytest.approx(
        0.5, abs=0.02
    )  # every round has a straggler, twice as slow
    assert lossy["again"] > 0.1
    assert uneven["again"] < 1e-6
    assert quiet["efficiency"] > max(one["efficiency"] for one in (uneven, straggling, lossy))
    # lost all 10 / 64 hours; a restart takes two minutes, and half of five rounds are played again
    a_round = sum(round_seconds(COSTS, 64, 8).values())
    again = a_round / 3600 * 64 / 10 * (120 + 5 / 2 * a_round)
    assert lossy["again"] == pytest.approx(again / (a_round + again))
    total = sum(lossy[part] for part in ("efficiency", "waiting", "reduced", "again"))
    assert total == pytest.approx(1.0)
