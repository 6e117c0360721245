"""A host that is an nn.Sequential of a user's own: its segments, what it keeps, how it begins, its
forward pass.

The module is made by a factory that is given the number of classes. One object stands for the hosts
of all networks: torch.func calls its children with the parameters and buffers of each. Found by
nets/own_hosts.py, run by nets/host.py.
"""

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.model.own_module import SKELETON_SEED, Factory, flat_parameters, made
from esper_soa.nets.model.parameters import Parameter
from esper_soa.nets.model.parts import Layer
from esper_soa.registry import HOST, reference_to


class Buffer(NamedTuple):
    """A tensor that a module keeps beside its parameters; rows hold its numbers as they hold
    weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, values: Tensor) -> Tensor:
        """What rows hold, as the module has it; floating-point numbers stay in the format of the
        rows.
        """
        return values if self.dtype.is_floating_point else values.to(self.dtype)


class Segment(NamedTuple):
    """A child of the chain, and what it makes of the image of one network."""

    name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    buffers: tuple[Buffer, ...]
    given: tuple[int, ...]  # shape of what it is given, without the batch
    gives: tuple[int, ...]  # [C, H, W] of features, [classes] of the last
    # Multiplications of an image, as torch counts them: of convolutions and matrix products.
    products: int

    @property
    def square(self) -> bool:
        """Whether it gives features [C, H, H], in which a seed can stand."""
        return len(self.gives) == 3 and self.gives[1] == self.gives[2]


@dataclass(frozen=True)
class OwnChain:
    """Modules one after the other, images [B, 3, 32, 32] to logits [B, classes]."""

    make: Factory  # of the number of classes
    classes: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In order, the last gives the logits."""
        return _segments(self.make, self.classes)

    def layer(self, number: int) -> Layer:
        """The segment `number` as a module by itself, by the name of what makes the chain."""
        return Layer(
            "own", reference_to(HOST, self.make), {"classes": self.classes, "segment": number}
        )

    def initial_rows(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh rows of parameters and of buffers [n, ...] from streams `keys` (int64 [n]): the
        module's own start.

        Its draws are by the stream. The keys are read by the host.
        """
        hosts = [made(self.make, self.classes, key) for key in keys.tolist()]
        parameters = torch.stack([flat_parameters(one) for one in hosts])
        buffers = torch.stack([flat_buffers(one, dtype) for one in hosts])
        return parameters.to(keys.device, dtype), buffers.to(keys.device)

    def train(
        self, number: int, parameters: list[Tensor], buffers: list[Tensor], x: Tensor, num_nets: int
    ) -> Tensor:
        """The segment of n networks, training: [B, n*C, ...] to such features.

        parameters: with a leading [n] each. The buffers [n * numbers] move in place.
        """
        segment = self.segments[number]
        rows = zip(buffers, segment.buffers, strict=True)
        # Copies: a batch norm keeps what it is given for its backward pass, and must not see it
        # move once more.
        kept = [buffer.of(one.view(num_nets, *buffer.shape).clone()) for one, buffer in rows]
        out, moved = self._run(number, parameters, kept, x, num_nets, True)
        for target, values in zip(buffers, moved, strict=True):
            target.copy_(values.reshape(-1))
        return out

    def infer(
        self, number: int, parameters: list[Tensor], buffers: list[Tensor], x: Tensor, num_nets: int
    ) -> Tensor:
        """As `train`, in eval mode: buffers, with a leading [n], stay. x may be images [B, 3, 32,
        32] of all.
        """
        segment = self.segments[number]
        kept = [buffer.of(one) for one, buffer in zip(buffers, segment.buffers, strict=True)]
        return self._run(number, parameters, kept, x, num_nets, False)[0]

    def _run(
        self,
        number: int,
        parameters: list[Tensor],
        buffers: list[Tensor],
        x: Tensor,
        num_nets: int,
        training: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output [B, n*C, ...] and the buffers [n, ...] behind the call."""
        segment = self.segments[number]
        module = _skeleton(self.make, self.classes, training, threading.get_ident())[number]
        names = [name for name, _ in segment.parameters]
        kept = [buffer.name for buffer in segment.buffers]

        def one(
            values: tuple[Tensor, ...], state: tuple[Tensor, ...], features: Tensor
        ) -> tuple[Tensor, ...]:
            given = dict(zip((*names, *kept), (*values, *state), strict=True))
            out = functional_call(module, given, (features,))
            return out, *(given[name] for name in kept)

        # Autocast does not reach into vmap: modules compute in the format of their weights.
        held = next(
            (one.dtype for one in (*parameters, *buffers) if one.is_floating_point()), x.dtype
        )
        features = x.to(held).unflatten(1, (-1, segment.given[0]))
        features = features.expand(-1, num_nets, *features.shape[2:]).transpose(0, 1)
        # A copy of its own, which the module may write to; torch 2.13's CPU backward of a
        # channels_last group norm crashes the process where the input needs no gradient.
        copied = features.clone(memory_format=torch.contiguous_format)
        out, *state = vmap(one)(tuple(parameters), tuple(buffers), copied)
        joined = out.transpose(0, 1).flatten(1, 2)
        if joined.dim() == 4:
            joined = joined.contiguous(memory_format=torch.channels_last)
        return joined, tuple(state)


def flat_buffers(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """All buffers of the module as a row [numbers]."""
    return torch.cat(
        [torch.zeros(0, dtype=dtype), *(one.reshape(-1).to(dtype) for one in module.buffers())]
    )


@lru_cache(maxsize=256)
def _skeleton(make: Factory, classes: int, training: bool, thread: int) -> nn.Sequential:
    """The chain that a thread puts parameters and buffers into: a call changes it for its
    duration.
    """
    return _chain(make, classes).train(training)


def _chain(make: Factory, classes: int) -> nn.Sequential:
    module = made(make, classes, SKELETON_SEED)
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"{type(module).__name__} is no nn.Sequential")
    return module


@lru_cache(maxsize=256)
def _segments(make: Factory, classes: int) -> tuple[Segment, ...]:
    """The children of the chain in eval mode, with one image."""
    x = torch.zeros(1, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    found = []
    for name, child in _chain(make, classes).eval().named_children():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            out = child(x.clone())
        found.append(
            Segment(
                name,
                tuple((key, tuple(one.shape)) for key, one in child.named_parameters()),
                tuple(
                    Buffer(key, tuple(one.shape), one.dtype) for key, one in child.named_buffers()
                ),
                tuple(x.shape[1:]),
                tuple(out.shape[1:]),
                counter.get_total_flops() // 2,
            )
        )
        x = out
    return tuple(found)


def tables(segment: Segment) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Parameters and buffers of a segment, of which `initial_rows` says how they begin."""
    buffers = tuple(Parameter(buffer.shape) for buffer in segment.buffers)
    return tuple(Parameter(shape) for _, shape in segment.parameters), buffers
