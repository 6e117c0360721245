"""Tensors arrive as they were, whatever lies beside them in the one copy."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.system.transfers import move, move_leaves, move_records

THERE = torch.device("cpu", 0)  # not "cpu", where all tensors are: what a machine without a GPU has
TENSORS = [
    torch.tensor(True),
    torch.arange(7, dtype=torch.int32)[::2],
    torch.empty(0, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.arange(3, dtype=torch.float64),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
]


class Pair(NamedTuple):
    a: list[Tensor]
    b: tuple[str | None, ...]


def test_tensors_arrive_as_they_were_as_views_of_one_buffer_or_in_memory_of_their_own() -> None:
    arrived = move(TENSORS, THERE)
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived if tensor.numel()}) == 1
    nested = {"a": [*TENSORS, "text"], "b": {"c": None}}
    moved = move_leaves(nested, THERE)
    assert (moved["a"].pop(), moved["b"]) == ("text", {"c": None})
    assert moved["a"][3].untyped_storage().nbytes() == 6 * 4
    record = Pair([*TENSORS], (None, "text"))
    placed = move_records([record], THERE)[0]
    assert (type(placed), placed.b) == (Pair, (None, "text"))
    assert placed.a[0].untyped_storage().data_ptr() == placed.a[1].untyped_storage().data_ptr()
    for found in (arrived, placed.a, moved["a"], move(TENSORS, TENSORS[0].device)):
        for tensor, given in zip(found, TENSORS, strict=True):
            assert (tensor.dtype, tensor.shape) == (given.dtype, given.shape)
            assert torch.equal(tensor, given)
