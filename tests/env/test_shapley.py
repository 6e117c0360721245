"""Shapley values on their own: the axioms, brute force over permutations, and intervals that keep
their word.
"""

import doctest
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper_soa.env import shapley
from esper_soa.env.shapley import arrival_orders, exact_shapley, prefix_codes, sampled_shapley

PLAYERS = 6


def all_subsets(num_players):
    codes = torch.arange(2**num_players)
    return (codes.unsqueeze(1) >> torch.arange(num_players)) & 1 == 1


def random_values(num_players, seed):
    return 100 * torch.rand(
        2**num_players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def value_function(values):
    """Look up by the code of the subset."""
    return lambda subsets: values[(subsets.long() << torch.arange(subsets.shape[1])).sum(1)]


def over_permutations(values, num_players):
    """Mean marginal gain over all n! orders of arrival."""
    gains = torch.zeros(num_players, dtype=torch.float64)
    orders = list(itertools.permutations(range(num_players)))
    for order in orders:
        present = 0
        for player in order:
            gains[player] += values[present | 1 << player] - values[present]
            present |= 1 << player
    return gains / len(orders)


@pytest.mark.parametrize("num_players", range(1, PLAYERS + 1))
def test_exact_values_equal_brute_force_over_permutations_in_any_order_of_rows(num_players):
    values = random_values(num_players, num_players)
    shuffled = torch.randperm(2**num_players, generator=torch.Generator().manual_seed(1))
    shares = exact_shapley(all_subsets(num_players)[shuffled], values[shuffled])
    torch.testing.assert_close(
        shares, over_permutations(values.tolist(), num_players), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("num_players", [2, 5, 8])
def test_exact_values_are_efficient_and_additive(num_players):
    subsets = all_subsets(num_players)
    one = random_values(num_players, 1)
    two = random_values(num_players, 2)
    first = exact_shapley(subsets, one)
    second = exact_shapley(subsets, two)
    torch.testing.assert_close(first.sum(), one[-1] - one[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(exact_shapley(subsets, one + two), first + second, rtol=0, atol=1e-5)


def test_players_who_do_the_same_get_the_same_and_who_does_nothing_gets_nothing():
    # values that depend on players 1 and 3 only by their number, and not at all on player 2
    subsets = all_subsets(5)
    reduced = torch.stack(
        (subsets[:, 0], subsets[:, 4], subsets[:, 1] & subsets[:, 3], subsets[:, 1] | subsets[:, 3])
    )
    values = random_values(4, 3)[(reduced.long() << torch.arange(4).unsqueeze(1)).sum(0)]
    shares = exact_shapley(subsets, values)
    assert shares[2].item() == pytest.approx(0.0, abs=1e-5)
    assert shares[1].item() == pytest.approx(shares[3].item(), abs=1e-5)
    assert shares[1].item() != pytest.approx(shares[0].item(), abs=1e-5)


def test_an_incomplete_table_is_refused():
    subsets = all_subsets(3)
    values = random_values(3, 0)
    with pytest.raises(ValueError, match="each of the 8 subsets once"):
        exact_shapley(subsets[:-1], values[:-1])
    with pytest.raises(ValueError, match="each of the 8 subsets once"):
        exact_shapley(subsets[[0, 0, 2, 3, 4, 5, 6, 7]], values)
    with pytest.raises(ValueError, match="Use sampled_shapley"):
        exact_shapley(torch.zeros(1, 13, dtype=torch.bool), torch.zeros(1))


def test_orders_are_permutations_in_pairs_of_opposites_and_differ_between_pairs_and_seeds():
    orders = arrival_orders(5, 8, 0, torch.device("cpu"))
    assert (orders.sort(1).values == torch.arange(5)).all()
    assert (orders[0::2].flip(1) == orders[1::2]).all()
    assert len(orders.unique(dim=0)) == 8
    assert not torch.equal(orders, arrival_orders(5, 8, 1, torch.device("cpu")))
    assert torch.equal(orders[:4], arrival_orders(5, 4, 0, torch.device("cpu")))


def test_prefixes_grow_by_one_arrival():
    assert prefix_codes(torch.tensor([[2, 0, 1]])).tolist() == [[0, 4, 5, 7]]


def test_every_order_of_arrival_is_about_equally_likely():
    # 6 orders of 3 players, 12000 draws of which half are reverses: 6000 independent ones, 1000 per
    # order and reverse
    orders = arrival_orders(3, 12_000, 7, torch.device("cpu"))[0::2]
    counts = (orders * torch.tensor([9, 3, 1])).sum(1).unique(return_counts=True)[1]
    assert counts.tolist() == pytest.approx([1000] * 6, abs=130)  # 4.5 standard deviations


def test_samples_lie_within_their_intervals_in_at_least_95_of_100_random_games_of_8_players():
    """The intervals of one game hold for its 8 players at once in 99 % of games, so that 95 of 100
    leave room for luck.

    At 99 % fewer than 95 successes have probability 0.003; the seeds are fixed, so the test gives
    the same each time.
    """
    subsets = all_subsets(8)
    inside = 0
    for game in range(100):
        values = random_values(8, game)
        sample = sampled_shapley(value_function(values), 8, num_samples=40, seed=game)
        exact = exact_shapley(subsets, values)
        inside += bool(((sample.lower <= exact) & (exact <= sample.upper)).all())
    assert inside >= 95


def test_a_standard_error_is_as_large_as_the_estimates_are_off():
    # 400 estimates: their spread is known to 1 / sqrt(800) = 3.5 %, so errors 15 % too large or too
    # small would show
    off = []
    errors = []
    for game in range(50):
        values = random_values(8, game)
        sample = sampled_shapley(value_function(values), 8, num_samples=40, seed=game)
        off.append(sample.value - exact_shapley(all_subsets(8), values))
        errors.append(sample.standard_error)
    root_mean_square = [torch.stack(part).square().mean().sqrt().item() for part in (off, errors)]
    assert root_mean_square[0] / root_mean_square[1] == pytest.approx(1, abs=0.12)


def test_sampled_values_share_out_the_whole_gain_and_more_samples_say_more():
    values = random_values(8, 5)
    few, many = (
        sampled_shapley(value_function(values), 8, num_samples=count) for count in (20, 2000)
    )
    for sample in (few, many):
        assert sample.value.sum().item() == pytest.approx((values[-1] - values[0]).item(), abs=1e-9)
    assert many.standard_error.mean() < few.standard_error.mean() / 5
    assert many.num_subsets == 256
    torch.testing.assert_close(many.value, exact_shapley(all_subsets(8), values), rtol=0, atol=3.0)


def test_an_additive_game_is_sampled_without_error():
    weights = torch.arange(8.0, dtype=torch.float64)
    sample = sampled_shapley(lambda subsets: subsets.double() @ weights, 8, num_samples=12)
    torch.testing.assert_close(sample.value, weights)
    assert sample.standard_error.max().item() < 1e-12


def test_a_value_is_asked_for_once_per_subset():
    asked = []

    def value(subsets):
        asked.append(subsets)
        return subsets.sum(1).double()

    sample = sampled_shapley(value, 4, num_samples=100)
    assert len(asked) == 1
    assert len(asked[0].unique(dim=0)) == len(asked[0]) == sample.num_subsets == 16


class Operations(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_twenty_players_take_no_more_operations_than_two():
    counted = []
    for players, samples in ((2, 12), (20, 200)):
        weights = torch.arange(float(players), dtype=torch.float64)

        def value(subsets, weights=weights):
            gains = subsets.double() @ weights
            return gains + gains.square() / 100

        with Operations() as operations:
            sample = sampled_shapley(value, players, num_samples=samples)
        counted.append(operations.count)
        # the square splits as w_i (w_i + sum of the others), the sum of all weights
        torch.testing.assert_close(
            sample.value, weights + weights.sum() * weights / 100, rtol=0, atol=1e-9
        )
        assert sample.num_subsets <= samples * (players - 1) + 2
    assert counted[0] == counted[1] < 200


@pytest.mark.parametrize(("players", "samples"), [(4, 10), (4, 13), (0, 20), (63, 20)])
def test_too_few_samples_and_too_many_players_are_refused(players, samples):
    with pytest.raises(ValueError, match="sampled_shapley"):
        sampled_shapley(lambda subsets: subsets.sum(1).double(), players, samples)


def test_the_examples_of_the_documentation_run():
    assert doctest.testmod(shapley) == (0, 7)
