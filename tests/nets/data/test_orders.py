"""Permutations that are looked up: whole, even, of their own for every key, and the same in
whatever pieces.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.sync_guard import SyncGuard
from esper_soa.nets.data.orders import grid, permutation_values
from esper_soa.system.streams import DATA_ORDER, stream_keys

SIZES = (1, 2, 3, 4, 5, 7, 11, 64, 97, 1009, 5003)


def keys(count: int, seed: int = 0) -> Tensor:
    return stream_keys(seed, DATA_ORDER, (2,), torch.arange(count))


def table(size: int, count: int) -> Tensor:
    """int64 [count, size]: a whole permutation per key."""
    return permutation_values(keys(count), torch.arange(size), size)


def beyond(observed: Tensor, freedom: int) -> float:
    """Standard deviations by which chi-square of equally likely counts is above its mean."""
    expected = observed.sum() / observed.numel()
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", SIZES)
def test_every_member_has_one_place(size: int) -> None:
    with SyncGuard():
        found = table(size, 3)
    assert torch.equal(found.sort(dim=1).values, torch.arange(size).expand(3, -1))


def test_few_places_are_to_spare_whatever_the_size() -> None:
    sizes = (*SIZES, 50_000, *range(40_000, 60_000, 37))
    spare = {size: grid(size)[0] * grid(size)[1] - size for size in sizes}
    assert max(spare.values()) <= 15
    assert min(spare.values()) == spare[50_000] == 0
    assert [grid(size) for size in (1, 3, 12, 13)] == [(1, 1), (2, 2), (3, 4), (2, 7)]
    assert table(7, 1).tolist() == [[5, 3, 6, 1, 0, 4, 2]]  # as recorded


def test_any_places_are_looked_up_alike() -> None:
    places = torch.tensor([1008, 3, 77, 3])
    assert torch.equal(permutation_values(keys(4), places, 1009), table(1009, 4)[:, places])
    assert torch.equal(permutation_values(keys(4)[2:], places, 1009), table(1009, 4)[2:, places])


@pytest.mark.parametrize("size", [3, 4, 7, 12])
def test_members_and_pairs_are_equally_likely_in_every_place(size: int) -> None:
    found = table(size, 40_000)
    members = torch.stack([column.bincount(minlength=size) for column in found.T]).double()
    assert beyond(members, (size - 1) ** 2) < 4
    pairs = (found[:, 0] * size + found[:, -1]).bincount(minlength=size * size).view(size, size)
    apart = pairs[~torch.eye(size, dtype=torch.bool)].double()
    assert beyond(apart, size * (size - 1) - 1) < 4


def test_permutations_of_envs_and_seeds_are_independent() -> None:
    size = 4001
    others = permutation_values(keys(20, seed=1), torch.arange(size), size)
    both = torch.cat((table(size, 20), others)).double()
    # a correlation has a standard deviation of 0.0158; the largest of 780 stays below 5 of them
    assert float((torch.corrcoef(both) - torch.eye(40)).abs().max()) < 0.08
    neighbours = torch.corrcoef(torch.stack((both[:, :-1].flatten(), both[:, 1:].flatten())))[0, 1]
    assert abs(float(neighbours)) < 0.0125  # 5 standard deviations of 160,000
