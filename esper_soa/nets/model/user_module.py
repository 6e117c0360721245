"""nn.Modules of users, called for n networks at once; those that are seeds, of the channels C of a
slot. One object stands for the modules of all networks: torch.func calls it with the parameters and
buffers of each, so it may keep nothing from call to call. A single network is called as it is,
images in channels_last where the module takes them so; several under vmap.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.config.nets import IMAGES, TOPOLOGIES
from esper_soa.config.registry import BLUEPRINT, RAISED, reference_to
from esper_soa.nets.model.parts import LayerSpec, Parameter, Part
from esper_soa.nets.precision import autocast

Factory = Callable[[int], nn.Module]
GENERATOR_USED = threading.Lock()  # all threads share torch's generator
FORMATS = torch.contiguous_format, torch.channels_last
SKELETON_SEED = 0  # of the module that others' parameters are put into; those it has are not used


def make_module(make: Factory, size: int, seed: int) -> nn.Module:
    """make(size), its draws from `seed` (int64); torch's generator is left as it was."""
    with GENERATOR_USED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make(size)


@lru_cache(maxsize=256)
def skeleton(make: Factory, size: int, training: bool | None, thread: int) -> nn.Module:
    """The module that a thread puts tensors into for a call; training: its mode, None: as made."""
    module = make_module(make, size, SKELETON_SEED)
    return module if training is None else module.train(training)


def initial_rows(
    make: Factory, size: int, keys: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fresh rows of parameters and of buffers [n, numbers] of modules from streams `keys` (int64
    [n]): as a module begins, its draws by the stream. The keys are read by the host.
    """

    def row(tensors: Iterable[Tensor]) -> Tensor:
        flat = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
        return torch.cat([torch.zeros(0, dtype=dtype), *flat])

    modules = [make_module(make, size, key) for key in keys.tolist()]
    parameters = torch.stack([row(module.parameters()) for module in modules])
    buffers = torch.stack([row(module.buffers()) for module in modules])
    return parameters.to(keys.device), buffers.to(keys.device)


class InputUse(NamedTuple):
    """How a module takes its input."""

    channels_last: bool  # whether it may lie in memory so
    writes: bool  # into it


def call_networks(
    module: nn.Module, values: Sequence[Tensor], buffers: Sequence[Tensor], x: Tensor, use: InputUse
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output [B, n*C, ...] and buffers [n, ...] behind a call of n networks on x [n, B, C, ...];
    values: parameters with a leading [n] each; buffers: likewise.
    """
    names, buffer_names, tied = _tensor_names(module)

    def call_network(network: Sequence[Tensor], features: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip((*names, *buffer_names), network, strict=True))
        out = functional_call(module, tensors, (features,), tie_weights=tied)
        return out, *(tensors[name] for name in buffer_names)

    if x.shape[0] == 1:
        # not by [0], whose gradient is a new tensor, which is not in channels_last
        network = [tensor.squeeze(0) for tensor in (*values, *buffers)]
        channels_last = use.channels_last
        # torch 2.13's CPU backward of a channels_last group norm crashes the process where the
        # input needs no gradient.
        if channels_last and torch.is_grad_enabled() and not x.requires_grad:
            network = [_as_channels_last(tensor) for tensor in network]  # so are its convolutions
            channels_last = False
        features = x.squeeze(0).contiguous(memory_format=FORMATS[channels_last])
        features = features.clone() if use.writes else features
        with autocast(torch.float32, x.device):  # which does not reach into vmap either
            output, *single = call_network(network, features)
        state = [tensor[None] for tensor in single]
    else:
        copied = x.clone(memory_format=torch.contiguous_format)  # to which the module may write
        out, *state = vmap(call_network)((*values, *buffers), copied)
        output = out.transpose(0, 1).flatten(1, 2)
    if output.dim() == 4:
        output = output.contiguous(memory_format=torch.channels_last)
    return output, tuple(state)


@lru_cache(maxsize=1024)
def _tensor_names(module: nn.Module) -> tuple[list[str], list[str], bool]:
    """Names of parameters and of buffers, and whether a buffer has two."""
    names = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    return names, buffers, len([*module.named_buffers(remove_duplicate=False)]) > len(buffers)


def _as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def input_use(module: nn.Module, x: Tensor) -> InputUse:
    """How the module takes features like x [1, ...] in both modes: channels_last where it gives an
    output for such, which one that views features as vectors does not. It is no longer what it was.
    """
    for channels_last in (True, False)[x.dim() != 4 :]:
        batch = x.repeat(2, *[1] * (x.dim() - 1))
        batch = batch.contiguous(memory_format=FORMATS[channels_last])
        module.to(memory_format=FORMATS[channels_last])  # type: ignore[call-overload]
        try:
            with torch.no_grad(), GENERATOR_USED, torch.random.fork_rng(devices=[]):
                before = batch._version
                for training in (True, False):
                    module.train(training)(batch)
                return InputUse(channels_last, batch._version > before)
        except RAISED:
            continue
    return InputUse(channels_last=False, writes=True)


def count_products(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The module's output for x [1, ...], and its multiplications as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = module(x.clone())
    return out, counter.get_total_flops() // 2


@dataclass(frozen=True)
class UserModule(Part):
    """A seed: a module that maps features [B, C, ...] to features of that shape."""

    make: Factory  # of the channels of a slot
    topology: str = IMAGES  # kind of features that it takes

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """The module's parameters in its order; `initial_rows` says how they begin."""
        module = skeleton(self.make, channels, None, thread=0)
        return tuple(Parameter(tuple(tensor.shape)) for tensor in module.parameters())

    def products(self, inputs: int, channels: int, positions: int) -> int:
        """Multiplications of a sample, with as many positions along each axis."""
        axes = TOPOLOGIES.index(self.topology)
        size = round(positions ** (1 / max(axes, 1)))
        return _seed_products(self.make, (channels, *[size] * axes))

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        """The module itself, by the name of what makes it."""
        return (LayerSpec("own", reference_to(BLUEPRINT, self.make), {"channels": channels}),)

    def initial_rows(self, channels: int, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Fresh rows [m, parameters] from streams `keys` (int64 [m])."""
        return initial_rows(self.make, channels, keys, dtype=dtype)[0]

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        """Output of m networks, shaped as x [B, m*C, ...]; parameters [m, ...] each."""
        num_nets = parameters[0].shape[0]
        channels = x.shape[1] // num_nets
        # Modules compute in the format of their weights, without autocast.
        features = x.to(parameters[0].dtype).unflatten(1, (num_nets, channels)).transpose(0, 1)
        module = skeleton(self.make, channels, None, thread=threading.get_ident())
        use = _seed_input_use(self.make, tuple(features.shape[2:]))
        return call_networks(module, parameters, (), x=features, use=use)[0].to(x.dtype)


@lru_cache(maxsize=256)
def _seed_products(make: Factory, shape: tuple[int, ...]) -> int:
    return count_products(make_module(make, shape[0], SKELETON_SEED), torch.zeros(1, *shape))[1]


@lru_cache(maxsize=256)
def _seed_input_use(make: Factory, shape: tuple[int, ...]) -> InputUse:
    return input_use(make_module(make, shape[0], SKELETON_SEED), torch.zeros(1, *shape))
