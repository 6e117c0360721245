"""What a rank of several makes of the numbers that torch.distributed gives it.

The other rank is stood in for here; tests/training/start/test_launch.py has real ones.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from esper_soa.runtime.ranks import RankGroup
from esper_soa.system.errors import RankLostError


class Half(RankGroup):
    """The second of two ranks of 5 envs: it has the last two."""

    def __init__(self) -> None:
        self.num_envs = 5
        self.rank = 1
        self.count = 2
        self.first_env = 3
        self._host = "gloo"


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the first rank gathers, in order; where it reduces it has 10 everywhere."""
    found: list[Tensor] = []
    sums = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
    sums[dist.ReduceOp.MIN] = torch.minimum

    def reduce(flat: Tensor, kind: dist.ReduceOp.RedOpType) -> None:
        flat.copy_(sums[kind](flat, torch.full_like(flat, 10.0)))

    def gather(rooms: list[Tensor], own: Tensor, group: str) -> None:
        assert (own.is_contiguous(), group) == (True, "gloo")
        rooms[0].copy_(found.pop(0) if found else own)
        rooms[1].copy_(own)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "all_gather", gather)
    return found


def test_the_envs_of_a_rank_are_taken_out_of_those_of_all() -> None:
    half = Half()
    assert (half.first, half.all_envs(2)) == (False, 5)
    assert half.rows_here(torch.arange(5)).tolist() == [3, 4]
    assert half.rows_here(torch.arange(10).view(2, 5), 1).tolist() == [[3, 4], [8, 9]]
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
    own = torch.ones(2, requires_grad=True)
    (3 * half.total(own)[0]).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == [3.0, 3.0]


def test_shares_that_differ_by_an_env_are_gathered_in_order(gathered: list[Tensor]) -> None:
    own = [torch.tensor([4, 5]), torch.tensor([[[4.5]], [[5.5]]])]
    first = torch.tensor([[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]], dtype=torch.float64)
    gathered.append(first)
    numbers, halves = Half().gather(own)
    assert (numbers.tolist(), numbers.dtype) == ([1, 2, 3, 4, 5], torch.int64)
    assert halves.shape == (5, 1, 1)
    assert halves.flatten().tolist() == [1.5, 2.5, 3.5, 4.5, 5.5]
    gathered.append(first)
    (across,) = Half().gather([torch.tensor([[4, 5], [6, 7]])], dim=1)
    assert across.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]


def test_policies_that_have_drifted_apart_are_noticed(gathered: list[Tensor]) -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    Half().check_same(weights)
    bits = weights.view(torch.int32).long()
    sums = torch.stack([bits.sum(), (bits * torch.tensor([1, 2, 3])).sum()])
    for other in (weights.flip(0), weights + 1e-6, -weights):
        told = (
            "^the policies of the ranks have drifted apart, which no arithmetic of theirs should "
            "do$"
        )
        gathered.append(sums)
        with pytest.raises(RuntimeError, match=told):
            Half().check_same(other)


def test_a_rank_that_is_gone_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(flat: Tensor, kind: dist.ReduceOp.RedOpType) -> None:
        raise RuntimeError("Connection closed\nby peer")

    monkeypatch.setattr(dist, "all_reduce", reduce)
    with pytest.raises(RankLostError) as caught:
        Half().extremes([torch.tensor(1.0)], [])
    told = "another rank has ended or does not answer (Connection closed\\nby peer)"
    assert str(caught.value) == told
