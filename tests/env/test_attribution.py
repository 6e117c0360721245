"""Attribution from subset accuracies: worked examples, Shapley's axioms, all permutations."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_world import CPU, tiny_settings

from esper_soa.build import build_world
from esper_soa.env.attribution import (
    lookup,
    pair_interactions,
    prefix_codes,
    sampled_shapley_values,
    shapley_values,
)
from esper_soa.env.config import AttributionConfig
from esper_soa.env.shapley import arrival_orders, sampled_shapley
from esper_soa.env.step import measure_, record_and_observe
from esper_soa.vocabulary import Blueprint, Stage


def table(num_slots, values):
    """Every subset of `num_slots` seeds for one env; values[code]."""
    codes = torch.arange(2**num_slots)[None]
    return (
        codes,
        torch.tensor(values, dtype=torch.float64)[None],
        torch.ones(1, num_slots, dtype=torch.bool),
    )


def brute_force(num_slots, values):
    """Mean marginal gain of each seed over all orders of arrival."""
    total = [0.0] * num_slots
    orders = list(itertools.permutations(range(num_slots)))
    for order in orders:
        present = 0
        for seed in order:
            total[seed] += values[present | 1 << seed] - values[present]
            present |= 1 << seed
    return [value / len(orders) for value in total]


def test_worked_game_has_the_known_shapley_values_and_interaction():
    # v = 50 + 2a + 3b + 1c + 1.5ab: the joint gain of a and b is split between them
    values = [
        50 + 2 * (s & 1) + 3 * (s >> 1 & 1) + (s >> 2 & 1) + 1.5 * (s & 3 == 3) for s in range(8)
    ]
    subset, accuracy, ablated = table(3, values)
    shapley, complete = shapley_values(subset, accuracy, ablated)
    torch.testing.assert_close(shapley, torch.tensor([[2.75, 3.75, 1.0]], dtype=torch.float64))
    assert complete.all()
    interactions = pair_interactions(subset, accuracy, ablated)[0]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 1] = expected[1, 0] = 1.5
    torch.testing.assert_close(interactions, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(0, 100), min_size=2**n, max_size=2**n))
)
def test_shapley_values_equal_brute_force_over_permutations_and_share_out_the_whole_gain(values):
    num_slots = len(values).bit_length() - 1
    subset, accuracy, ablated = table(num_slots, values)
    shapley, _ = shapley_values(subset, accuracy, ablated)
    expected = torch.tensor([brute_force(num_slots, values)], dtype=torch.float64)
    torch.testing.assert_close(shapley, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        shapley.sum(), accuracy[0, -1] - accuracy[0, 0], rtol=1e-9, atol=1e-9
    )


def test_a_missing_row_is_reported_and_leaves_no_shapley_value():
    subset, accuracy, ablated = table(2, [10.0, 12.0, 13.0, 20.0])
    subset = subset.clone()
    subset[0, 1] = -1
    shapley, complete = shapley_values(subset, accuracy, ablated)
    assert not complete.any()
    assert (shapley == 0).all()
    value, found = lookup(subset, accuracy, torch.tensor([[1, 2]]))
    assert found.tolist() == [[False, True]]
    assert value.tolist() == [[0.0, 13.0]]


def sparse_table(codes, values):
    """Two envs with the subsets `codes` alone; `values` maps codes to values, the second env has
    twice of each.
    """
    subset = torch.tensor([sorted(set(codes))]).expand(2, -1)
    accuracy = torch.stack([values[subset[0]], 2 * values[subset[0]]])
    return subset, accuracy


def test_sampled_values_are_those_of_the_sampler_that_calls_a_value_function():
    orders = arrival_orders(6, 20, 3, CPU)
    values = torch.rand(64, generator=torch.Generator().manual_seed(1)).double()
    subset, accuracy = sparse_table(prefix_codes(orders).flatten().tolist(), values)
    value, error, known = sampled_shapley_values(
        subset, accuracy, torch.ones(2, 6, dtype=torch.bool), orders
    )
    bits = 1 << torch.arange(6)
    sample = sampled_shapley(
        lambda subsets: values[torch.where(subsets, bits, 0).sum(1)], 6, 20, seed=3
    )
    assert known.all()
    torch.testing.assert_close(value, torch.stack([sample.value, 2 * sample.value]))
    torch.testing.assert_close(
        error, torch.stack([sample.standard_error, 2 * sample.standard_error])
    )


def test_orders_over_all_slots_serve_envs_with_some_of_them_and_share_out_the_whole_gain():
    # slots 1, 2 and 5 of six: full = 2 + 4 + 32 = 38
    orders = arrival_orders(6, 12, 0, CPU)
    values = torch.rand(64, generator=torch.Generator().manual_seed(2)).double()
    ablated = torch.tensor([[False, True, True, False, False, True]]).expand(2, -1)
    subset, accuracy = sparse_table((prefix_codes(orders) & 38).flatten().tolist(), values)
    value, error, known = sampled_shapley_values(subset, accuracy, ablated, orders)
    assert known.all()
    gain = values[38] - values[0]
    torch.testing.assert_close(value.sum(1), torch.stack([gain, 2 * gain]))
    assert (value[:, [0, 3, 4]] == 0).all()
    assert (error[:, [1, 2, 5]] > 0).all()
    # without the empty subset
    _, _, known = sampled_shapley_values(subset[:, 1:], accuracy[:, 1:], ablated, orders)
    assert not known.any()


def test_a_host_with_more_than_four_seeds_has_interactions_and_sampled_values():
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
    found = record_and_observe(world.rules, state, measured).attribution
    assert torch.equal(measured.ablated, present)
    assert (measured.subset >= 0).sum(1).tolist()[2] == 16
    assert found.total.any()
    torch.testing.assert_close(found.shapley.sum(1), found.total)
    assert (found.shapley_error[:2] > 0).any(1).all()
    assert (found.shapley_error[2] == 0).all()
    assert (found.interaction_sum != 0).any(1).all()
