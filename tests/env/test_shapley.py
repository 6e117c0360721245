"""Shapley values on their own: brute force over permutations, orders, and errors that keep their
word.
"""

import itertools

import pytest
import torch
from torch import Tensor

from esper_soa.env.attribution import (
    arrival_orders,
    prefix_codes,
    sampled_shapley_values,
    shapley_values,
)
from tests.builders.env_records import CPU


def random_values(num_players: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 100 * torch.rand(2**num_players, generator=generator, dtype=torch.float64)


def exact(values: Tensor) -> Tensor:
    """Shapley values [n] of values [2^n] by the code of the subset."""
    players = torch.ones(1, len(values).bit_length() - 1, dtype=torch.bool)
    return shapley_values(torch.arange(len(values))[None], values[None], players)[0][0]


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
    players = torch.ones(1, num_players, dtype=torch.bool)
    shares, _ = shapley_values(shuffled[None], values[shuffled][None], players)
    expected = over_permutations(values.tolist(), num_players)
    torch.testing.assert_close(shares[0], expected, rtol=1e-9, atol=1e-9)


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


def test_errors_are_as_large_as_estimates_are_off() -> None:
    """The spread of 800 estimates is known to 1 / sqrt(1600) = 2.5 %."""
    off = []
    errors = []
    for game in range(100):
        values = random_values(8, game)
        orders = arrival_orders(8, 40, game, CPU)
        players = torch.ones(1, 8, dtype=torch.bool)
        table = torch.arange(256)[None], values[None]
        value, error, known = sampled_shapley_values(*table, players, orders)
        assert known.all()
        off.append(value[0] - exact(values))
        errors.append(error[0])
        assert value.sum().item() == pytest.approx((values[-1] - values[0]).item())
    root_mean_square = [torch.stack(part).square().mean().sqrt().item() for part in (off, errors)]
    assert root_mean_square[0] / root_mean_square[1] == pytest.approx(1, abs=0.12)
