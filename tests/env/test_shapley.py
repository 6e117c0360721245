"""Shapley values on their own: the axioms, brute force over permutations, and intervals that keep
their word.
"""

import doctest
import itertools

import pytest
import torch
from env_records import CPU, numbers
from torch import Tensor

from esper_soa.config.env import MIN_SHAPLEY_SAMPLES
from esper_soa.env import shapley
from esper_soa.env.shapley import (
    ValueFunction,
    arrival_orders,
    estimate,
    exact_shapley,
    prefix_codes,
    sampled_shapley,
)


def all_subsets(num_players: int) -> Tensor:
    return (torch.arange(2**num_players).unsqueeze(1) >> torch.arange(num_players)) & 1 == 1


def random_values(num_players: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 100 * torch.rand(2**num_players, generator=generator, dtype=torch.float64)


def value_function(values: Tensor) -> ValueFunction:
    """Look up by the code of the subset."""
    return lambda subsets: values[(subsets.long() << torch.arange(subsets.shape[1])).sum(1)]


def over_permutations(values: list[float], num_players: int) -> Tensor:
    """Mean marginal gain over all n! orders of arrival."""
    gains = torch.zeros(num_players, dtype=torch.float64)
    orders = list(itertools.permutations(range(num_players)))
    for order in orders:
        present = 0
        for player in order:
            gains[player] += values[present | 1 << player] - values[present]
            present |= 1 << player
    return gains / len(orders)


@pytest.mark.parametrize("num_players", range(1, 6))
def test_exact_values_equal_brute_force_over_permutations_in_any_order_of_rows(
    num_players: int,
) -> None:
    values = random_values(num_players, num_players)
    shuffled = torch.randperm(2**num_players, generator=torch.Generator().manual_seed(1))
    shares = exact_shapley(all_subsets(num_players)[shuffled], values[shuffled])
    expected = over_permutations(values.tolist(), num_players)
    torch.testing.assert_close(shares, expected, rtol=1e-9, atol=1e-9)


def test_an_incomplete_table_is_refused() -> None:
    subsets = all_subsets(3)
    values = random_values(3, 0)
    with pytest.raises(ValueError, match="each of the 8 subsets once"):
        exact_shapley(subsets[:-1], values[:-1])
    with pytest.raises(ValueError, match="each of the 8 subsets once"):
        exact_shapley(subsets[[0, 0, 2, 3, 4, 5, 6, 7]], values)
    with pytest.raises(ValueError, match="Use sampled_shapley"):
        exact_shapley(torch.zeros(1, 13, dtype=torch.bool), torch.zeros(1))


def test_orders_are_permutations_in_pairs_of_opposites_and_differ_between_pairs_and_seeds() -> None:
    orders = arrival_orders(5, 8, 0, CPU)
    assert (orders.sort(1).values == torch.arange(5)).all()
    assert (orders[0::2].flip(1) == orders[1::2]).all()
    assert len(orders.unique(dim=0)) == 8
    assert not torch.equal(orders, arrival_orders(5, 8, 1, CPU))
    assert torch.equal(orders[:4], arrival_orders(5, 4, 0, CPU))
    assert prefix_codes(torch.tensor([[2, 0, 1]])).tolist() == [[0, 4, 5, 7]]


def test_every_order_of_arrival_is_about_equally_likely() -> None:
    # 6 orders of 3 players, 12000 draws of which half are reverses: 6000 independent ones, 1000 per
    # order and reverse
    orders = arrival_orders(3, 12_000, 7, CPU)[0::2]
    counts = (orders * torch.tensor([9, 3, 1])).sum(1).unique(return_counts=True)[1]
    assert counts.tolist() == pytest.approx([1000] * 6, abs=130)  # 4.5 standard deviations


def test_intervals_hold_in_95_of_100_games_and_errors_are_as_large_as_estimates_are_off() -> None:
    """The intervals of one game hold for its 8 players at once in 99 % of games, so that 95 of 100
    leave room for luck.

    At 99 % fewer than 95 successes have probability 0.003; the seeds are fixed, so the test gives
    the same each time. The spread of 800 estimates is known to 1 / sqrt(1600) = 2.5 %.
    """
    inside = 0
    off = []
    errors = []
    for game in range(100):
        values = random_values(8, game)
        sample = sampled_shapley(value_function(values), 8, num_samples=40, seed=game)
        exact = exact_shapley(all_subsets(8), values)
        inside += bool(((sample.lower <= exact) & (exact <= sample.upper)).all())
        off.append(sample.value - exact)
        errors.append(sample.standard_error)
        assert sample.value.sum().item() == pytest.approx((values[-1] - values[0]).item())
    assert inside >= 95
    root_mean_square = [torch.stack(part).square().mean().sqrt().item() for part in (off, errors)]
    assert root_mean_square[0] / root_mean_square[1] == pytest.approx(1, abs=0.12)


def test_an_estimate_is_the_mean_of_pairs_with_an_interval_of_students_t() -> None:
    # Two players, six observations: 1 .. 6 with mean 3.5 and variance 17.5 / 5; twice of it for the
    # second player.
    observations = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] * numbers(1.0, 2.0)
    sample = estimate(observations, 7)
    error = (3.5 / 6) ** 0.5
    assert sample.value.tolist() == [3.5, 7.0]
    assert sample.standard_error.tolist() == pytest.approx([error, 2 * error])
    # One in a hundred is shared out over two players and two sides: 0.25 % on each; t with 5
    # degrees of freedom is 4.7733 there
    reach = 4.7733406 * error
    assert sample.lower.tolist() == pytest.approx([3.5 - reach, 7 - 2 * reach])
    assert sample.upper.tolist() == pytest.approx([3.5 + reach, 7 + 2 * reach])
    assert sample.num_subsets == 7


@pytest.mark.parametrize("players", [1, 12, 62])
def test_an_additive_game_is_sampled_without_error(players: int) -> None:
    weights = torch.arange(1.0, players + 1, dtype=torch.float64)
    sample = sampled_shapley(
        lambda subsets: subsets.double() @ weights, players, MIN_SHAPLEY_SAMPLES
    )
    torch.testing.assert_close(sample.value, weights)
    assert sample.standard_error.max().item() < 1e-12
    if players <= 12:
        torch.testing.assert_close(
            exact_shapley(all_subsets(players), all_subsets(players).double() @ weights), weights
        )


def test_a_value_is_asked_for_once_with_few_subsets_and_none_twice() -> None:
    for players, samples in ((2, 12), (20, 200)):
        weights = torch.arange(float(players), dtype=torch.float64)
        asked = []

        def value(subsets: Tensor, weights=weights, asked=asked) -> Tensor:
            asked.append(subsets)
            gains = subsets.double() @ weights
            return gains + gains.square() / 100

        sample = sampled_shapley(value, players, num_samples=samples)
        # the square splits as w_i (w_i + sum of the others), the sum of all weights
        expected = weights + weights.sum() * weights / 100
        torch.testing.assert_close(sample.value, expected, rtol=0, atol=1e-9)
        assert sample.num_subsets <= samples * (players - 1) + 2
        assert len(asked) == 1
        assert len(asked[0].unique(dim=0)) == len(asked[0]) == sample.num_subsets


@pytest.mark.parametrize(("players", "samples"), [(4, 10), (4, 13), (0, 20), (63, 20)])
def test_too_few_samples_and_too_many_players_are_refused(players: int, samples: int) -> None:
    with pytest.raises(ValueError, match="sampled_shapley"):
        sampled_shapley(lambda subsets: subsets.sum(1).double(), players, samples)


def test_the_examples_of_the_documentation_run() -> None:
    assert doctest.testmod(shapley) == (0, 7)
