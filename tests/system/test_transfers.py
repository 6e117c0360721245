"""Tensors arrive as they were, whatever lies beside them in the one copy."""

import torch
from torch import Tensor

from esper_soa.system.transfers import move, move_leaves

THERE = torch.device("cpu", 0)  # not "cpu", where all tensors are: what a machine without a GPU has
TENSORS = [
    torch.tensor(True),
    torch.arange(7, dtype=torch.int32)[::2],
    torch.empty(0, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor([True, False, True]),
    torch.arange(3, dtype=torch.float64),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
    torch.tensor(2**40),
]


def same(found: Tensor, given: Tensor) -> bool:
    shaped = (found.dtype, found.shape) == (given.dtype, given.shape)
    return shaped and torch.equal(found, given)


def test_tensors_of_all_kinds_arrive_by_one_copy_as_views_of_one_buffer() -> None:
    arrived = move(TENSORS, THERE)
    assert all(map(same, arrived, TENSORS))
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived if tensor.numel()}) == 1
    assert move(TENSORS, TENSORS[0].device) == TENSORS


def test_nested_content_arrives_in_memory_of_its_own_beside_what_is_no_tensor() -> None:
    content = {"a": [TENSORS[3], "text"], "b": {"c": TENSORS[5], "d": None}, "e": 3}
    found = move_leaves(content, THERE)
    assert same(found["a"][0], TENSORS[3])
    assert same(found["b"]["c"], TENSORS[5])
    assert found["a"][0].untyped_storage().nbytes() == 6 * 4
    assert (found["a"][1], found["b"]["d"], found["e"]) == ("text", None, 3)
