"""nn.Modules of users' own as seeds and as segments of hosts, called for N networks at once.

A seed is made by a factory that is given the channels C of a slot; a host, an nn.Sequential, by one
that is given the number of classes. One object stands for the modules of all networks: torch.func
calls it with the parameters and buffers of each, so it may keep nothing from call to call.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.config.registry import BLUEPRINT, HOST, reference_to
from esper_soa.nets.model.parts import Arguments, Layer, Parameter, SameWidth

Factory = Callable[[int], nn.Module]
GENERATOR_USED = threading.Lock()  # torch's generator is one for all threads
SKELETON_SEED = 0  # of the module that others' parameters are put into; its own are never used


def made(make: Factory, size: int, seed: int) -> nn.Module:
    """make(size), its draws from `seed` (int64); torch's own generator is left as it was."""
    with GENERATOR_USED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make(size)


@lru_cache(maxsize=256)
def _skeleton(make: Factory, size: int, training: bool | None, thread: int) -> nn.Module:
    """The module that a thread puts tensors into: a call changes it for its duration.

    training: its mode, as it was made where None.
    """
    module = made(make, size, SKELETON_SEED)
    return module if training is None else module.train(training)


def _rows(modules: Sequence[nn.Module], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Parameters and buffers of modules as rows [n, numbers] in `dtype`."""

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        values = [one.detach().reshape(-1).to(dtype) for one in tensors]
        return torch.cat([torch.zeros(0, dtype=dtype), *values])

    parameters = [flat(module.parameters()) for module in modules]
    return torch.stack(parameters), torch.stack([flat(module.buffers()) for module in modules])


def _call(
    module: nn.Module, values: Sequence[Tensor], buffers: Sequence[Tensor], x: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output [B, n*C, ...] and buffers [n, ...] behind a call of n networks.

    values: parameters with a leading [n] each; buffers: likewise; x [n, B, C, ...].
    """
    names = [name for name, _ in module.named_parameters()]
    kept = [name for name, _ in module.named_buffers()]

    def one(
        own: tuple[Tensor, ...], state: tuple[Tensor, ...], features: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = dict(zip((*names, *kept), (*own, *state), strict=True))
        out = functional_call(module, tensors, (features,))
        return out, *(tensors[name] for name in kept)

    # A copy of its own, which the module may write to; torch 2.13's CPU backward of a channels_last
    # group norm crashes the process where the input needs no gradient.
    copied = x.clone(memory_format=torch.contiguous_format)
    out, *state = vmap(one)(tuple(values), tuple(buffers), copied)
    joined = out.transpose(0, 1).flatten(1, 2)
    if joined.dim() == 4:
        joined = joined.contiguous(memory_format=torch.channels_last)
    return joined, tuple(state)


def _products(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """What the module gives for x [1, ...], and its multiplications as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = module(x.clone())
    return out, counter.get_total_flops() // 2


@dataclass(frozen=True)
class OwnModule(SameWidth):
    """A seed: a module that maps features [B, C, H, W] to such features, as own_parts.py asks."""

    make: Factory  # of the channels of a slot

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """The module's parameters in its order; `initial_rows` says how they begin."""
        module = _skeleton(self.make, channels, None, 0)
        return tuple(Parameter(tuple(one.shape)) for one in module.parameters())

    def products(self, inputs: int, channels: int, pixels: int) -> int:
        """Multiplications of a square image."""
        return _seed_products(self.make, channels, math.isqrt(pixels))

    def layers(self, inputs: int, channels: int) -> list[Layer]:
        """The module itself, by the name of what makes it."""
        return [Layer("own", reference_to(BLUEPRINT, self.make), {"channels": channels})]

    def initial_rows(self, channels: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Fresh rows [m, parameters] from streams `keys` (int64 [m]): the module's own start, its
        draws by the stream. The keys are read by the host.
        """
        modules = [made(self.make, channels, key) for key in keys.tolist()]
        return _rows(modules, dtype)[0].to(keys.device)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        """Output [B, m*C, H, W] of m networks; parameters [m, ...] each, x [B, m*C, H, W]."""
        num_nets = parameters[0].shape[0]
        channels = x.shape[1] // num_nets
        # Autocast does not reach into vmap: modules compute in the format of their weights.
        features = x.to(parameters[0].dtype).unflatten(1, (num_nets, channels)).transpose(0, 1)
        module = _skeleton(self.make, channels, None, threading.get_ident())
        return _call(module, parameters, (), features)[0].to(x.dtype)


@lru_cache(maxsize=256)
def _seed_products(make: Factory, channels: int, side: int) -> int:
    return _products(made(make, channels, SKELETON_SEED), torch.zeros(1, channels, side, side))[1]


class OwnSegment(NamedTuple):
    """A child of a host of a user's own, and what it makes of the image of one network."""

    chain: "OwnChain"
    number: int  # in the chain
    name: str
    parameters: tuple[Parameter, ...]  # shapes; `initial_rows` says how they begin
    statistics: tuple[Parameter, ...]  # its buffers, whose numbers rows hold as weights'
    dtypes: tuple[torch.dtype, ...]  # of the buffers; floating-point numbers keep the rows' format
    given: tuple[int, ...]  # shape of what it is given, without the batch
    gives: tuple[int, ...]  # [C, H, W] of features, [classes] of the last
    products: int  # multiplications of an image
    slot: int = -1  # behind it, as of host.Block

    @property
    def square(self) -> bool:
        """Whether it gives features [C, H, H], in which a seed can stand."""
        return len(self.gives) == 3 and self.gives[1] == self.gives[2]

    @property
    def channels(self) -> int:
        return self.gives[0]

    @property
    def size(self) -> int:
        return self.gives[1]

    @property
    def activations(self) -> int:
        return math.prod(self.gives)

    @property
    def layers(self) -> list[Layer]:
        """The segment as a module by itself, by the name of what makes the chain."""
        made_by = reference_to(HOST, self.chain.make)
        given: Arguments = {"classes": self.chain.classes, "segment": self.number}
        return [Layer("own", made_by, given)]

    def train(
        self, parameters: list[Tensor], buffers: list[Tensor], x: Tensor, num_nets: int
    ) -> Tensor:
        """The segment of n networks, training: [B, n*C, ...] to such features.

        parameters: with a leading [n] each. The buffers [n * numbers] move in place.
        """
        # Copies: a batch norm keeps what it is given for its backward pass, and must not see it
        # move once more.
        rows = zip(buffers, self.statistics, strict=True)
        kept = [one.view(num_nets, *buffer.shape).clone() for one, buffer in rows]
        out, moved = self._run(parameters, kept, x, num_nets, True)
        for target, values in zip(buffers, moved, strict=True):
            target.copy_(values.reshape(-1))
        return out

    def infer(
        self, parameters: list[Tensor], buffers: list[Tensor], x: Tensor, num_nets: int
    ) -> Tensor:
        """The segment in eval mode: buffers, with a leading [n], stay. x may be images of all."""
        return self._run(parameters, buffers, x, num_nets, False)[0]

    def _run(
        self,
        parameters: list[Tensor],
        buffers: list[Tensor],
        x: Tensor,
        num_nets: int,
        training: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        module = _skeleton(self.chain.make, self.chain.classes, training, threading.get_ident())
        assert isinstance(module, nn.Sequential)
        rows = zip(buffers, self.dtypes, strict=True)
        kept = [one if dtype.is_floating_point else one.to(dtype) for one, dtype in rows]
        # Modules compute in the format of their weights, as above.
        of_weights = [one.dtype for one in (*parameters, *kept) if one.is_floating_point()]
        features = x.to((*of_weights, x.dtype)[0]).unflatten(1, (-1, self.given[0]))
        features = features.expand(-1, num_nets, *features.shape[2:]).transpose(0, 1)
        return _call(module[self.number], parameters, kept, features)


@dataclass(frozen=True)
class OwnChain:
    """A host: modules one after the other, images [B, 3, 32, 32] to logits [B, classes]."""

    make: Factory  # of the number of classes
    classes: int

    @property
    def segments(self) -> tuple[OwnSegment, ...]:
        """In order, the last gives the logits."""
        return _segments(self)

    def initial_rows(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh rows of parameters and of buffers [n, ...]; as of OwnModule."""
        modules = [made(self.make, self.classes, key) for key in keys.tolist()]
        parameters, buffers = _rows(modules, dtype)
        return parameters.to(keys.device), buffers.to(keys.device)


@lru_cache(maxsize=256)
def _segments(chain: OwnChain) -> tuple[OwnSegment, ...]:
    """The children of the chain in eval mode, with one image."""
    module = made(chain.make, chain.classes, SKELETON_SEED)
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"{type(module).__name__} is no nn.Sequential")
    x = torch.zeros(1, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    found = []
    for number, (name, child) in enumerate(module.eval().named_children()):
        out, products = _products(child, x)
        parameters = tuple(Parameter(tuple(one.shape)) for one in child.parameters())
        statistics = tuple(Parameter(tuple(one.shape)) for one in child.buffers())
        dtypes = tuple(one.dtype for one in child.buffers())
        shapes = tuple(x.shape[1:]), tuple(out.shape[1:])
        found.append(
            OwnSegment(chain, number, name, parameters, statistics, dtypes, *shapes, products)
        )
        x = out
    return tuple(found)
