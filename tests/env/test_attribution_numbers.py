"""Everything that `attribute` says about three envs, worked out by hand from their subset rows."""

import pytest
import torch
from torch import Tensor

from esper_soa.env.attribution import attribute, sampled_shapley_values
from esper_soa.env.lifecycle import empty_slots
from esper_soa.state import Attribution, GradientStats, Measurements
from esper_soa.vocabulary import Stage

# Accuracy by code of env 0 with three ablated seeds, env 1 with slots 1 and 2, env 2 without any;
# -1 = not evaluated.
ROWS = [
    {7: 60.0, 6: 51.0, 5: 54.0, 3: 55.0, 1: 52.0, 2: 49.0, 4: 53.0, 0: 50.0},
    {6: 70.0, 4: 66.0, 2: 63.0, 0: 61.0},
    {0: 40.0},
]
STAGES = [
    [Stage.FOSSILIZED, Stage.BLENDING, Stage.HOLDING],
    [Stage.FOSSILIZED, Stage.BLENDING, Stage.HOLDING],
    [Stage.TRAINING, Stage.EMPTY, Stage.EMPTY],
]


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(scope="module")
def found() -> Attribution:
    subset = torch.full((3, 8), -1)
    accuracy = torch.full((3, 8), 99.0, dtype=torch.float64)
    for env, rows in enumerate(ROWS):
        subset[env, : len(rows)] = torch.tensor(list(rows))
        accuracy[env, : len(rows)] = torch.tensor(list(rows.values()), dtype=torch.float64)
    none = torch.zeros(3, 3, dtype=torch.float64)
    gradients = GradientStats(
        l2=none,
        health=none,
        ratio=none,
        vanishing=none > 0,
        exploding=none > 0,
        measured=none > 0,
        batch_size=[3, 3],
    )
    nothing = torch.zeros(3, dtype=torch.float64)
    measured = Measurements(
        train_loss=nothing,
        train_accuracy=nothing,
        val_loss=nothing,
        accuracy=accuracy,
        subset=subset,
        ablated=torch.tensor([[True, True, True], [False, True, True], [False, False, False]]),
        gradients=gradients,
        batch_size=[3],
    )
    slots = empty_slots(3, 3, "cpu").replace(
        stage=torch.tensor(STAGES),
        alpha=doubles([1.0, 0.25, 0.5], [1.0, 0.25, 0.5], [0.0, 0.0, 0.0]),
    )
    return attribute(measured, slots)


def test_a_contribution_is_what_all_seeds_have_more_than_all_but_one(found: Attribution) -> None:
    assert found.contribution.tolist() == [[9.0, 6.0, 5.0], [0.0, 4.0, 7.0], [0.0, 0.0, 0.0]]
    assert found.measured.tolist() == [[True] * 3, [False, True, True], [False] * 3]


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
    expected = doubles([29 / 6, 11 / 6, 20 / 6], [0.0, 3.0, 6.0], [0.0, 0.0, 0.0])
    torch.testing.assert_close(found.shapley, expected)
    assert not found.shapley_error.any()


def test_the_error_of_sampled_values_is_that_of_the_mean_of_pairs() -> None:
    # In 012 and 210 slot 0 comes first and last, in 102 and 201 it comes in the middle.
    orders = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1], [0, 1, 2], [2, 1, 0]])
    codes = torch.arange(8)[None]
    values = doubles([50.0, 52.0, 49.0, 55.0, 53.0, 54.0, 51.0, 60.0])
    share, error, known = sampled_shapley_values(
        codes, values, torch.ones(1, 3, dtype=torch.bool), orders
    )
    # Slot 0: pairs (2 + 9) / 2, (6 + 1) / 2 and (2 + 9) / 2 again: 5.5, 3.5, 5.5
    assert known.tolist() == [True]
    assert share[0, 0].item() == pytest.approx(14.5 / 3)
    # of three pairs, two are free
    deviation = (2 * (5.5 - 14.5 / 3) ** 2 + (3.5 - 14.5 / 3) ** 2) / 2
    assert error[0, 0].item() == pytest.approx((deviation / 3) ** 0.5)


def test_envs_with_gaps_have_no_sampled_value_and_no_error() -> None:
    orders = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]])
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, -1]])
    values = doubles([50.0, 52.0, 49.0, 55.0, 53.0, 54.0, 51.0, 60.0]).expand(2, -1)
    share, error, known = sampled_shapley_values(
        codes, values, torch.ones(2, 3, dtype=torch.bool), orders
    )
    assert known.tolist() == [True, False]
    assert (error[0] > 0).any()
    assert not share[1].any()
    assert not error[1].any()
