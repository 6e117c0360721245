"""Outcomes of episodes, Pareto front and hypervolume of known sets, blueprint statistics over
single env-steps.
"""

import math

import pytest
import torch

from esper_soa.env import outcome
from esper_soa.env.outcome import (
    compute_cost,
    count_blueprints,
    empty_blueprint_stats,
    hypervolume,
    outcomes,
    pareto_front,
    stability,
    trade_offs,
)
from esper_soa.env.signals import push
from esper_soa.state import Slots, initial
from esper_soa.vocabulary import BLUEPRINT_NAMES, NUM_BLUEPRINTS, Blueprint, Stage
from tests.builders.env_records import CPU, empty_state, numbers, with_values
from tests.builders.reward_cases import make_settings


def state_with(**slots):
    """Two envs of three slots; fields [2, 3] given as nested lists."""
    state = empty_state(2, 3, max_steps=4)
    return state.replace(slots=with_values(state.slots, **slots))


def test_stability_falls_with_the_variance_of_the_rewards_received():
    # env 0: 1, 3 -> mean 2, variance 1 -> 1/2 (the zeros before were never received); env 1: one
    # reward; env 2: none
    rewards = torch.zeros(3, 20).double()
    rewards[0, -2:] = numbers(1.0, 3.0)
    rewards[1, -1] = 7.0
    assert stability(rewards, torch.tensor([2, 1, 0])).tolist() == [0.5, 1.0, 1.0]


def test_only_the_last_twenty_rewards_count():
    rewards = torch.zeros(1, 20).double()
    for reward in [1000.0] + [1.0, 3.0] * 10:
        rewards = push(rewards, numbers(reward))
    assert rewards[0, 0].item() == 1.0
    assert stability(rewards, torch.tensor([21])).tolist() == [0.5]


def test_an_outcome_tells_accuracy_size_and_the_fate_of_the_seeds():
    state = state_with(
        stage=[
            [Stage.FOSSILIZED, Stage.TRAINING, Stage.EMPTY],
            [Stage.EMBARGOED, Stage.EMPTY, Stage.EMPTY],
        ],
        blueprint=[[3, 2, -1], [5, -1, -1]],
    )
    state = state.replace(
        signals=with_values(state.signals, val_accuracy=[80.0, 79.9], step=[4, 3]),
        totals=with_values(
            state.totals,
            reward=[1.5, -2.5],
            germinated=[2, 1],
            fossilized=[1, 0],
            contributing=[1, 0],
            pruned=[0, 1],
        ),
    )
    rewards = torch.zeros(2, 20).double()
    outcome = outcomes(state, rewards, make_settings().counts, make_settings().flop)
    # host 1000, seeds 100 + 3 and 200 + 2
    assert outcome.param_ratio.tolist() == [1.305, 1.0]
    assert outcome.success.tolist() == [True, False]
    assert outcome.stability.tolist() == [1.0, 1.0]
    assert outcome.unfinished.tolist() == [1, 0]
    assert (outcome.germinated == outcome.fossilized + outcome.pruned + outcome.unfinished).all()
    assert outcome.reward.tolist() == [1.5, -2.5]
    assert outcome.num_steps.tolist() == [4, 3]
    assert outcome.compute_cost.tolist() == pytest.approx([1.02, 1.0])


def test_every_fossil_costs_and_nothing_else_does():
    state = state_with(
        stage=[[Stage.FOSSILIZED, Stage.FOSSILIZED, Stage.HOLDING], [Stage.EMPTY] * 3],
        blueprint=[[Blueprint.ATTENTION, Blueprint.CONV_HEAVY, Blueprint.ATTENTION], [-1, -1, -1]],
    )
    assert compute_cost(state.slots, make_settings().flop).tolist() == pytest.approx(
        [1 + 0.35 + 0.25, 1.0]
    )
    alone = initial(Slots, (NUM_BLUEPRINTS, 1), CPU)
    alone = with_values(alone, stage=Stage.FOSSILIZED, blueprint=[*zip(range(NUM_BLUEPRINTS))])
    costs = dict(
        zip(BLUEPRINT_NAMES, compute_cost(alone, make_settings().flop).tolist(), strict=True)
    )
    assert costs == pytest.approx(
        {"noop": 1.0, "norm": 1.02, "lora": 1.05, "bottleneck": 1.05, "conv_small": 1.05}
        | {"depthwise": 1.08, "lora_large": 1.08, "conv_light": 1.15, "mlp_small": 1.15}
        | {"mlp": 1.2, "conv_heavy": 1.25, "attention": 1.35, "flex_attention": 1.35}
    )


def test_the_front_holds_what_nothing_dominates():
    # b is beaten by a in all, c is smaller than a, d is more stable than a; e equals a: neither is
    # strictly better
    accuracy = numbers(80.0, 70.0, 60.0, 50.0, 80.0)
    steady = numbers(0.5, 0.4, 0.5, 0.9, 0.5)
    ratio = numbers(1.5, 1.6, 1.1, 1.9, 1.5)
    assert pareto_front(accuracy, steady, ratio).tolist() == [True, False, True, True, True]


def test_a_point_that_ties_in_two_and_loses_in_one_is_dominated_and_one_with_nan_not_in_the_way():
    same = numbers(1.0, 1.0)
    assert pareto_front(numbers(80.0, 79.0), same, same).tolist() == [True, False]
    assert pareto_front(same, numbers(0.5, 0.6), same).tolist() == [False, True]
    assert pareto_front(same, same, numbers(1.2, 1.1)).tolist() == [False, True]
    assert pareto_front(numbers(math.nan, 10.0), same, same).tolist() == [False, True]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_the_hypervolume_of_a_staircase_is_the_area_below_it(order):
    # (80, 1.5): 80 (2 - 1.5) = 40; (60, 1.2): 60 (1.5 - 1.2) = 18; (50, 1.4) is covered; (70, 2.5)
    # is too large; (40, 1): 40 (1.2 - 1) = 8
    accuracy = numbers(80.0, 60.0, 50.0, 70.0, 40.0)[order]
    ratio = numbers(1.5, 1.2, 1.4, 2.5, 1.0)[order]
    assert hypervolume(accuracy, ratio).item() == pytest.approx(66.0)


def test_no_points_and_points_beyond_the_reference_cover_nothing_and_of_equals_the_smaller_counts():
    assert hypervolume(numbers(), numbers()).item() == 0.0
    assert hypervolume(numbers(50.0, 0.0), numbers(2.0, 1.0)).item() == 0.0
    assert hypervolume(numbers(50.0, 50.0), numbers(1.5, 1.0)).item() == pytest.approx(50.0)


def test_front_and_hypervolume_of_a_run_follow_from_the_trade_offs_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # (80, 0.5, 1.5) twice counts once; (70, 0.4, 1.6) is beaten
    some = [numbers(80.0, 0.5, 1.5), numbers(70.0, 0.4, 1.6), numbers(80.0, 0.5, 1.5)]
    assert trade_offs(torch.stack(some)).tolist() == [[80.0, 0.5, 1.5]]
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(60, 3, generator=generator).double() * numbers(100.0, 1.0, 2.5)
    whole = trade_offs(points)
    kept = trade_offs(points[:0])
    assert kept.shape == (0, 3)
    monkeypatch.setattr(outcome, "MAX_POINTS", 8)  # of many points at a time
    for few in points.split(25):
        kept = trade_offs(torch.cat((kept, few)))
    assert torch.equal(kept, whole)
    assert 1 < len(kept) == pareto_front(*points.unbind(1)).sum() < 30
    areas = [hypervolume(part[:, 0], part[:, 2]).item() for part in (kept, points)]
    assert areas[0] == pytest.approx(areas[1])


def test_births_and_ends_are_counted_by_blueprint():
    stage = [
        [Stage.EMPTY, Stage.HOLDING, Stage.TRAINING],
        [Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED],
    ]
    before = state_with(
        stage=stage,
        blueprint=[[-1, 1, 3], [1, 3, 3]],
        accuracy_initial=[[0.0, 50.0, 50.0], [10.0, 50.0, 10.0]],
        accuracy_current=[[0.0, 54.0, 47.0], [90.0, 48.0, 90.0]],
        accuracy_blending_start=[[0.0, 51.0, 0.0], [0.0, 49.0, 0.0]],
        blending_started=[[False, True, False], [True, True, False]],
        contribution=[[0.0, 2.5, 0.0], [9.0, 9.0, 9.0]],
        contribution_known=[[False, True, False], [True, True, True]],
    ).slots
    after = state_with(
        stage=[
            [Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED],
            [Stage.FOSSILIZED, Stage.PRUNED, Stage.EMBARGOED],
        ],
        blueprint=[[2, 1, 3], [1, 3, 3]],
    ).slots
    stats = count_blueprints(empty_blueprint_stats(torch.device("cpu")), before, after)
    assert stats.germinated.nonzero().tolist() == [[2]]
    assert stats.fossilized.tolist() == [0, 1] + [0] * 11
    assert stats.pruned.tolist() == [0, 0, 0, 2] + [0] * 9
    assert stats.means()["mean_gain"][1].item() == 4.0
    assert stats.means()["mean_blending_gain"][1].item() == 3.0
    assert stats.means()["mean_contribution"][1].item() == 2.5
    assert stats.means()["mean_churn"][3].item() == -2.5  # 47 - 50 and 48 - 50
    assert stats.means()["fossilization_rate"][[1, 3]].tolist() == [100.0, 0.0]
    assert stats.means()["fossilization_rate"][0].isnan()
    again = count_blueprints(stats, before, after)
    assert again.pruned[3].item() == 4
    assert again.means()["mean_churn"][3].item() == -2.5
    assert empty_blueprint_stats(torch.device("cpu")).germinated.sum() == 0


@pytest.mark.parametrize(
    ("count", "before", "after"),
    [
        ("germinated", Stage.EMPTY, Stage.GERMINATED),
        ("fossilized", Stage.HOLDING, Stage.FOSSILIZED),
        ("pruned", Stage.TRAINING, Stage.PRUNED),
    ],
)
def test_one_birth_or_end_among_seeds_that_stay_is_counted(count: str, before: int, after: int):
    stay = [Stage.BLENDING, Stage.FOSSILIZED]
    stages = ([[stage, *stay]] for stage in (before, after))
    kinds = (state_with(stage=stage, blueprint=[[2, 1, 3]]).slots for stage in stages)
    stats = count_blueprints(empty_blueprint_stats(torch.device("cpu")), *kinds)
    for name in ("germinated", "fossilized", "pruned"):
        assert getattr(stats, name).nonzero().tolist() == ([[2]] if name == count else [])


def test_a_fossil_that_was_never_measured_has_no_contribution():
    stage = [[Stage.HOLDING, Stage.EMPTY, Stage.EMPTY]] * 2
    before = state_with(
        stage=stage, blueprint=[[1, -1, -1]] * 2, contribution=[[3.0, 0.0, 0.0]] * 2
    ).slots
    after = before.replace(
        stage=torch.where(before.stage == Stage.HOLDING, Stage.FOSSILIZED, before.stage)
    )
    stats = count_blueprints(empty_blueprint_stats(torch.device("cpu")), before, after)
    assert stats.fossilized[1].item() == 2
    assert stats.measured.sum() == 0
    assert stats.means()["mean_contribution"][1].isnan()
