"""A part that is an nn.Module of a user's own: its parameters, how they begin, its multiplications,
its forward pass.

The module is made by a factory that is given the channels C of a slot. One object stands for the
modules of all
networks: torch.func calls it with the parameters of each, so it may keep nothing from call to call.
Found by nets/own_blueprints.py, put into an Architecture of this one part, run by nets/forward.py.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.nets.model.parameters import Parameter
from esper_soa.nets.model.parts import Layer
from esper_soa.registry import BLUEPRINT, reference_to

Factory = Callable[[int], nn.Module]
GENERATOR_USED = threading.Lock()  # torch's generator is one for all threads
# of the module that others' parameters are put into; its own numbers are never used
SKELETON_SEED = 0


@dataclass(frozen=True)
class OwnModule:
    """A module that maps features [B, C, H, W] to such features."""

    make: Factory

    def outputs_of(self, inputs: int, channels: int) -> int:
        """As many channels as it is given; nets/own_blueprints.py asks the module itself."""
        return inputs

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """The module's parameters in its order; `initial_rows` says how they begin."""
        return _parameters(self.make, channels)

    def products(self, inputs: int, channels: int, pixels: int) -> int:
        """Multiplications of a square image, as torch counts them: of convolutions and matrix
        products.
        """
        return _products(self.make, channels, math.isqrt(pixels))

    def layers(self, inputs: int, channels: int) -> list[Layer]:
        """The module itself, by the name of what makes it."""
        return [Layer("own", reference_to(BLUEPRINT, self.make), {"channels": channels})]

    def initial_rows(self, channels: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Fresh rows [m, parameters] from streams `keys` (int64 [m]): the module's own start, its
        draws by the stream.

        The keys are read by the host.
        """
        rows = [flat_parameters(made(self.make, channels, key)) for key in keys.tolist()]
        return torch.stack(rows).to(keys.device, dtype)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        """Output [B, m*C, H, W] of m networks; parameters with a leading [m] each, x [B, m*C, H,
        W].
        """
        num_nets = parameters[0].shape[0]
        channels = x.shape[1] // num_nets
        module = _skeleton(self.make, channels, threading.get_ident())
        names = [name for name, _ in module.named_parameters()]

        def one(values: tuple[Tensor, ...], features: Tensor) -> Tensor:
            return functional_call(module, dict(zip(names, values, strict=True)), (features,))

        # Autocast does not reach into vmap: modules compute in the format of their weights.
        features = x.to(parameters[0].dtype).unflatten(1, (num_nets, channels)).transpose(0, 1)
        # A copy of its own, which the module may write to; torch 2.13's CPU backward of a
        # channels_last group norm crashes the process where the input needs no gradient.
        out = vmap(one)(tuple(parameters), features.clone(memory_format=torch.contiguous_format))
        return (
            out.transpose(0, 1)
            .flatten(1, 2)
            .to(x.dtype)
            .contiguous(memory_format=torch.channels_last)
        )


def made(make: Factory, channels: int, seed: int) -> nn.Module:
    """A module whose draws come from `seed` (int64); torch's own generator is left as it was."""
    with GENERATOR_USED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make(channels)


def flat_parameters(module: nn.Module) -> Tensor:
    """All parameters of the module as a row [parameters]."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@lru_cache(maxsize=256)
def _skeleton(make: Factory, channels: int, thread: int) -> nn.Module:
    """The module that a thread puts parameters into: a call changes it for its duration."""
    return made(make, channels, SKELETON_SEED)


@lru_cache(maxsize=256)
def _parameters(make: Factory, channels: int) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(tuple(one.shape)) for one in made(make, channels, SKELETON_SEED).parameters()
    )


@lru_cache(maxsize=256)
def _products(make: Factory, channels: int, side: int) -> int:
    module = made(make, channels, SKELETON_SEED)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, channels, side, side))
    return counter.get_total_flops() // 2
