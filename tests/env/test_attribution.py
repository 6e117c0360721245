"""Attribution from subset accuracies: three envs worked out by hand, gaps, sampled values, a real
host with many seeds.
"""

import pytest
import torch
from torch import Tensor

from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.env import AttributionConfig
from esper_soa.env.attribution import (
    arrival_orders,
    attribute,
    lookup,
    prefix_codes,
    sampled_shapley_values,
    shapley_values,
)
from esper_soa.env.step import measure_, record_and_observe
from esper_soa.state import Attribution, Slots, initial
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blueprint, Stage
from tests.builders.env_records import CPU, numbers, with_values
from tests.builders.tiny_world import made_up, play_state, tiny_rules, tiny_settings

# Accuracy by code of env 0 with three ablated seeds, env 1 with slots 1 and 2, env 2 without any;
# -1 = not evaluated.
ROWS = [
    {7: 60.0, 6: 51.0, 5: 54.0, 3: 55.0, 1: 52.0, 2: 49.0, 4: 53.0, 0: 50.0},
    {6: 70.0, 4: 66.0, 2: 63.0, 0: 61.0},
    {0: 40.0},
]
ABLATED = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
GROWN = [Stage.FOSSILIZED, Stage.BLENDING, Stage.HOLDING]
WORTH = numbers([50.0, 52.0, 49.0, 55.0, 53.0, 54.0, 51.0, 60.0])  # of env 0, by code


@pytest.fixture(scope="module")
def found() -> Attribution:
    subset = torch.full((3, 8), -1)
    accuracy = torch.full((3, 8), 99.0, dtype=torch.float64)
    for env, rows in enumerate(ROWS):
        subset[env, : len(rows)] = torch.tensor(list(rows))
        accuracy[env, : len(rows)] = numbers(*rows.values())
    rules = tiny_rules(3, 4)
    state = next(play_state(rules, 3, 0, WaitPolicy())).before
    measured = made_up(rules, state, 0).replace(subset=subset, accuracy=accuracy, ablated=ABLATED)
    stages = [GROWN, GROWN, [Stage.TRAINING, Stage.EMPTY, Stage.EMPTY]]
    return attribute(measured, with_values(initial(Slots, (3, 3), CPU), stage=stages))


def test_a_contribution_is_what_all_seeds_have_more_than_all_but_one(found: Attribution) -> None:
    assert found.contribution.tolist() == [[9.0, 6.0, 5.0], [0.0, 4.0, 7.0], [0.0, 0.0, 0.0]]
    assert torch.equal(found.measured, ABLATED)


def test_the_total_is_what_all_seeds_add_and_fossils_alone_are_the_committed_accuracy(
    found: Attribution,
) -> None:
    assert found.total.tolist() == [10.0, 9.0, 0.0]
    assert found.total_known.tolist() == [True, True, False]
    assert found.committed.tolist() == [52.0, 61.0, 40.0]  # the fossil of env 1 is not ablated


def test_interactions_are_summed_and_only_positive_ones_boost(found: Attribution) -> None:
    # Env 0: 55 - 52 - 49 + 50 = 4, 54 - 52 - 53 + 50 = -1, 51 - 49 - 53 + 50 = -1; env 1: 70 - 63 -
    # 66 + 61 = 2
    assert found.interaction_sum.tolist() == [[3.0, 3.0, -2.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]
    pairs = torch.zeros(3, 3, 3, dtype=torch.float64)
    pairs[0, 0, 1] = pairs[0, 1, 0] = 4
    pairs[1, 1, 2] = pairs[1, 2, 1] = 2
    assert torch.equal(found.pair_boost, pairs)


def test_shapley_values_weigh_every_subset_by_the_orders_that_meet_it(found: Attribution) -> None:
    # 1/3 of the gains first and last, 1/6 of each in the middle: slot 0 (2 + 9) / 3 + (6 + 1) / 6,
    # slot 1 (-1 + 6) / 3 + (3 - 2) / 6, slot 2 (3 + 5) / 3 + (2 + 2) / 6; of two seeds half of
    # each: (2 + 4) / 2, (5 + 7) / 2
    expected = numbers([29 / 6, 11 / 6, 20 / 6], [0.0, 3.0, 6.0], [0.0, 0.0, 0.0])
    torch.testing.assert_close(found.shapley, expected)
    assert not found.shapley_error.any()


def test_a_missing_row_is_reported_and_leaves_no_shapley_value() -> None:
    subset = torch.tensor([[0, -1, 2, 3]])
    accuracy = numbers([10.0, 12.0, 13.0, 20.0])
    shapley, complete = shapley_values(subset, accuracy, torch.ones(1, 2, dtype=torch.bool))
    assert not complete.any()
    assert (shapley == 0).all()
    value, known = lookup(subset, accuracy, torch.tensor([[1, 2]]))
    assert known.tolist() == [[False, True]]
    assert value.tolist() == [[0.0, 13.0]]


# --- sampled values


def sampled(
    orders: Tensor, values: Tensor, ablated: list[bool], gap: int = -2
) -> tuple[Tensor, Tensor, Tensor]:
    """Of two envs with the subsets that the orders need; the second has twice of each value, and
    lacks the subset `gap`.
    """
    present = torch.tensor([ablated]).expand(2, -1)
    full = int((present[0].long() << torch.arange(len(ablated))).sum())
    subset = (prefix_codes(orders) & full).unique().expand(2, -1).clone()
    accuracy = torch.stack([values[subset[0]], 2 * values[subset[0]]])
    subset[1] = torch.where(subset[1] == gap, -1, subset[1])
    return sampled_shapley_values(subset, accuracy, present, orders)


def test_the_error_of_sampled_values_is_that_of_the_mean_of_pairs() -> None:
    # In 012 and 210 slot 0 comes first and last, in 102 and 201 it comes in the middle.
    orders = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1], [0, 1, 2], [2, 1, 0]])
    share, error, known = sampled(orders, WORTH[0], [True] * 3, gap=7)
    # Slot 0: pairs (2 + 9) / 2, (6 + 1) / 2 and (2 + 9) / 2 again: 5.5, 3.5, 5.5
    assert share[0, 0].item() == pytest.approx(14.5 / 3)
    # of three pairs, two are free
    deviation = (2 * (5.5 - 14.5 / 3) ** 2 + (3.5 - 14.5 / 3) ** 2) / 2
    assert error[0, 0].item() == pytest.approx((deviation / 3) ** 0.5)
    # an env with a gap has no value and no error
    assert known.tolist() == [True, False]
    assert not share[1].any()
    assert not error[1].any()


def test_orders_over_all_slots_serve_envs_with_some_of_them_and_share_out_the_whole_gain() -> None:
    # slots 1, 2 and 5 of six: full = 2 + 4 + 32 = 38
    orders = arrival_orders(6, 12, 0, CPU)
    values = torch.rand(64, generator=torch.Generator().manual_seed(2)).double()
    value, error, known = sampled(orders, values, [False, True, True, False, False, True])
    assert known.all()
    gain = values[38] - values[0]
    torch.testing.assert_close(value.sum(1), torch.stack([gain, 2 * gain]))
    assert (value[:, [0, 3, 4]] == 0).all()
    assert (error[:, [1, 2, 5]] > 0).all()


def test_a_host_with_more_than_four_seeds_has_interactions_and_sampled_values() -> None:
    # six seeds, five, and four, which have all 16 subsets; a seed at alpha 1 of random weights
    # changes the answers
    cfg = tiny_settings(3, 6, 4)
    cfg.attribution = AttributionConfig(shapley_samples=12)
    cfg.val_samples = 64
    cfg.data.synthetic_test = 64
    world = build_world(cfg, CPU)
    state = world.start_round(0)
    present = torch.arange(6) < torch.tensor([[6], [5], [4]])
    slots = state.slots.replace(
        stage=torch.where(present, Stage.HOLDING, Stage.EMPTY),
        blueprint=torch.where(present, Blueprint.CONV_LIGHT, -1),
        alpha=present.double(),
        newborn=present,
    )
    state, measured = measure_(
        world.rules, world.weights, state.replace(slots=slots), world.work(0)
    )
    _, found, _, _ = record_and_observe(world.rules, state, measured)
    assert torch.equal(measured.ablated, present)
    assert (measured.subset >= 0).sum(1).tolist()[2] == 16
    assert found.total.any()
    torch.testing.assert_close(found.shapley.sum(1), found.total)
    assert (found.shapley_error[:2] > 0).any(1).all()
    assert (found.shapley_error[2] == 0).all()
    assert (found.interaction_sum != 0).any(1).all()
