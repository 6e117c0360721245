"""Tensors between the host and a device, many by one copy."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Content = TypeVar("Content")


def staged(array: np.ndarray) -> Tensor:
    """The array itself as a tensor, to be moved to a device with others."""
    return torch.from_numpy(array)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on `device`, by one copy that the host does not wait for; on a CPU as they are."""
    return move(list(map(staged, arrays)), device)


def move(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`: those of another device by one copy, as views of one buffer.

    All others lie on one device. The host waits for a copy from a GPU, not for one to it, which is
    from pinned memory: the driver would stage any other.
    """
    moving = [tensor for tensor in tensors if tensor.device != device]
    if not moving:
        return list(tensors)
    moving.sort(key=Tensor.element_size, reverse=True)  # each begins at a multiple of its own
    parts = [part.detach().contiguous().view(-1).view(torch.uint8) for part in moving]
    sizes = [part.numel() for part in parts]
    if moving[0].device.type == "cpu":
        pinned = device.type == "cuda"
        packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        torch.cat(parts, out=packed)
        packed = packed.to(device, non_blocking=True)
    else:
        packed = torch.cat(parts).to(device)
    pieces = zip(moving, packed.split(sizes), strict=True)
    arrived = {id(part): piece.view(part.dtype).view(part.shape) for part, piece in pieces}
    return [arrived.get(id(tensor), tensor) for tensor in tensors]


def move_records(records: Content, device: torch.device) -> Content:
    """Nested records, lists and tuples with their tensors on `device`, by one copy; see `move`."""
    arrived = move(list(_tensors_in(records)), device)
    return _with_tensors(records, iter(arrived))  # type: ignore[return-value]


def _tensors_in(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from _tensors_in(each)


def _with_tensors(part: object, given: Iterator[Tensor]) -> object:
    if isinstance(part, Tensor):
        return next(given)
    if not isinstance(part, list | tuple):
        return part
    parts = [_with_tensors(each, given) for each in part]
    return part._make(parts) if hasattr(part, "_make") else type(part)(parts)


def move_leaves(content: Content, device: torch.device) -> Content:
    """Nested content with its tensors on `device`, each in its own memory, by one copy."""
    leaves, spec = tree_flatten(content)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    arrived = move([leaves[place] for place in places], device)
    for place, tensor in zip(places, arrived, strict=True):
        if tensor is not leaves[place]:
            leaves[place] = tensor.clone()
    return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]


def move_module_(module: nn.Module, device: torch.device) -> None:
    """Move the module as `module.to(device)` does, by one copy."""
    tensors = [*module.parameters(), *module.buffers()]
    arrived = dict(zip(tensors, move_leaves(tensors, device), strict=True))
    module._apply(arrived.__getitem__)
