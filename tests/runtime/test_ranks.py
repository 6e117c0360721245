"""What a rank of several makes of the numbers that torch.distributed gives it.

Other ranks are stood in for here; tests/training/test_ranks.py has real ones.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from esper_soa.runtime.ranks import RankGroup


class Half(RankGroup):
    """The second of two ranks of 5 envs: it has the last two.

    other: what the first one gathers.
    """

    def __init__(self, *other: Tensor) -> None:
        self.num_envs = 5
        self.rank = 1
        self.count = 2
        self.first_env = 3
        self.other = list(other)

    def all_gather(self, numbers: Tensor) -> list[Tensor]:
        return [self.other.pop(0), numbers]

    def reduced(self, flat: Tensor, kind: object = dist.ReduceOp.SUM) -> Tensor:
        """The first rank has 10 everywhere."""
        ten = torch.full_like(flat, 10.0)
        if kind == dist.ReduceOp.MAX:
            return torch.maximum(flat, ten)
        return torch.minimum(flat, ten) if kind == dist.ReduceOp.MIN else flat + ten


def test_the_envs_of_a_rank_are_taken_out_of_those_of_all() -> None:
    half = Half()
    assert (half.first, half.all_envs(2)) == (False, 5)
    assert half.own(torch.arange(5)).tolist() == [3, 4]
    assert half.own(torch.arange(10).view(2, 5), 1).tolist() == [[3, 4], [8, 9]]
    assert half.local_envs(torch.tensor([4, 0, 3, 2])).tolist() == [4, 3]


def test_sums_and_extremes_are_over_all_ranks_in_their_own_shapes() -> None:
    half = Half()
    total, counts = half.total(torch.ones(2, 1), torch.tensor([1, 2]))
    assert (total.tolist(), counts.tolist()) == ([[11.0], [11.0]], [11, 12])
    assert (total.dtype, counts.dtype) == (torch.float32, torch.int64)
    gradients = half.total_gradients([torch.zeros(2), torch.ones(1, 2)])
    assert [one.tolist() for one in gradients] == [[10.0, 10.0], [[11.0, 11.0]]]
    largest, smallest = half.extremes(
        [torch.tensor(11.0), torch.tensor(9.0)], [torch.tensor(11.0), torch.tensor(9.0)]
    )
    assert [float(one) for one in largest] == [11.0, 10.0]
    assert [float(one) for one in smallest] == [10.0, 9.0]
    assert half.extremes([], []) == ([], [])


def test_shares_that_differ_by_an_env_are_gathered_in_order() -> None:
    own = [torch.tensor([4, 5]), torch.tensor([[[4.5]], [[5.5]]])]
    first = torch.tensor([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], dtype=torch.float64)
    numbers, halves = Half(first).gather(own)
    assert (numbers.tolist(), numbers.dtype) == ([1, 2, 3, 4, 5], torch.int64)
    assert halves.shape == (5, 1, 1)
    assert halves.flatten().tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]
    (across,) = Half(first).gather([torch.tensor([[4, 5], [6, 7]])], dim=1)
    assert across.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]


def test_policies_that_have_drifted_apart_are_noticed() -> None:
    sums: list[Tensor] = []

    class Noted(Half):
        def all_gather(self, numbers: Tensor) -> list[Tensor]:
            sums.append(numbers)
            return [sums[0], numbers]

    weights = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        Noted().check_same(weights)
    for other in (weights.flip(0), weights + 1e-6, -weights):
        told = (
            "^the policies of the ranks have drifted apart, which no arithmetic of theirs should "
            "do$"
        )
        with pytest.raises(RuntimeError, match=told):
            Noted().check_same(other)
