"""Attribution from subset accuracies: worked examples, Shapley's axioms, brute force over permutations."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_soa.env.attribution import lookup, pair_interactions, shapley_values


def table(num_slots, values):
    """Every subset of `num_slots` seeds for one env; values[code]."""
    codes = torch.arange(2**num_slots)[None]
    return codes, torch.tensor(values, dtype=torch.float64)[None], torch.ones(1, num_slots, dtype=torch.bool)


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
    values = [50 + 2 * (s & 1) + 3 * (s >> 1 & 1) + (s >> 2 & 1) + 1.5 * (s & 3 == 3) for s in range(8)]
    subset, accuracy, ablated = table(3, values)
    shapley, complete = shapley_values(subset, accuracy, ablated)
    torch.testing.assert_close(shapley, torch.tensor([[2.75, 3.75, 1.0]], dtype=torch.float64))
    assert complete.all()
    interactions = pair_interactions(subset, accuracy, ablated)[0]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0, 1] = expected[1, 0] = 1.5
    torch.testing.assert_close(interactions, expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(0, 100), min_size=2**n, max_size=2**n)))
def test_shapley_values_equal_brute_force_over_permutations_and_share_out_the_whole_gain(values):
    num_slots = len(values).bit_length() - 1
    subset, accuracy, ablated = table(num_slots, values)
    shapley, _ = shapley_values(subset, accuracy, ablated)
    expected = torch.tensor([brute_force(num_slots, values)], dtype=torch.float64)
    torch.testing.assert_close(shapley, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shapley.sum(), accuracy[0, -1] - accuracy[0, 0], rtol=1e-9, atol=1e-9)


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
