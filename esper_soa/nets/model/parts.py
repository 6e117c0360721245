"""The parts that seeds are made of, as data: parameters, how these begin, multiplications; and the
flat rows of numbers, one per network, that parameters are kept in.

Clipping, SGD, re-initialisation and snapshots work on rows and never look inside. Widths of parts
follow from C, the channels of the slot, so one tuple of parts describes a seed in every slot.
Here are the parts of images; sequence_parts.py has those of sequences.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.nets import IMAGES
from esper_soa.nets import batched
from esper_soa.nets.batched import NORM_EPS
from esper_soa.system import streams

CHANNELS_PER_GROUP = 16
DRAWN_AT_ONCE = (
    2**18
)  # numbers drawn at the same time: what is in between takes little memory for any host


class Parameter(NamedTuple):
    """One parameter tensor of a network: it starts at value + bound * U(-1, 1) + std * N(0, 1)."""

    shape: tuple[int, ...]
    bound: float = 0.0
    value: float = 0.0
    cleared: bool = False  # at 0 instead, in a seed that is germinated with MULTIPLY
    std: float = 0.0


class Table(NamedTuple):
    """The parameters of a network in row order."""

    parameters: tuple[Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Numbers per parameter tensor."""
        return [math.prod(parameter.shape) for parameter in self.parameters]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """A view [n, *shape] per parameter of rows [n, total]."""
        both = zip(rows.split(self.sizes, dim=1), self.parameters, strict=True)
        return [part.reshape(part.shape[0], *parameter.shape) for part, parameter in both]

    def spread(self, facts: Sequence[float], device: torch.device) -> Tensor:
        """The fact of each parameter tensor for all of its numbers: [total]."""
        each = zip(self.sizes, facts, strict=True)
        return torch.cat([torch.full((size,), fact, device=device) for size, fact in each])

    def initial(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Fresh rows [n, total] from the random streams `keys` (int64 [n])."""
        rows = torch.empty(keys.shape[0], self.total, dtype=dtype, device=keys.device)
        if not self.parameters:
            return rows
        facts = [
            [parameter.bound for parameter in self.parameters],
            [parameter.value for parameter in self.parameters],
            [parameter.std for parameter in self.parameters],
        ]
        columns = torch.stack([self.spread(values, keys.device) for values in facts]).to(dtype)
        width = max(1, DRAWN_AT_ONCE // keys.shape[0])
        for start in range(0, self.total, width):
            bound, value, std = columns[:, start : start + width]
            places = torch.arange(start, start + len(bound), device=keys.device)
            draws = streams.uniform(keys[:, None], places, dtype)
            drawn = value + bound * (2 * draws - 1)
            for first, end in self._normal_spans():
                part = slice(max(first - start, 0), max(end - start, 0))
                drawn[:, part] += std[part] * normal_numbers(draws[:, part])
            rows[:, start : start + width] = drawn
        return rows

    def _normal_spans(self) -> Iterator[tuple[int, int]]:
        """First column, and that behind the last, of neighbours that begin with normal numbers."""
        ends = zip(self.parameters, self.sizes, accumulate(self.sizes), strict=True)
        for is_normal, group in groupby(ends, key=lambda part: part[0].std > 0):
            (_, size, first_end), *others = group
            if is_normal:
                yield first_end - size, others[-1][2] if others else first_end


def normal_numbers(draws: Tensor) -> Tensor:
    """Numbers of N(0, 1) from uniform draws in [0, 1), by the inverse of its distribution."""
    # half a step up, as the least of them is 0, of which the inverse is infinite
    step = 2.0**-53 if draws.dtype == torch.float64 else 2.0**-24
    return torch.special.ndtri((draws + step / 2).clamp(max=1 - step))


def norm_groups(channels: int) -> int:
    """Groups of a group norm: most of 32, 16, ... that leave 16 channels, else most that divide."""
    divisors = [groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0]
    preferred = [groups for groups in divisors if channels // groups >= CHANNELS_PER_GROUP]
    return (preferred or divisors)[0]


@dataclass(frozen=True)
class Width:
    """A number of channels that follows from C: times * C // over, and at least `least`."""

    times: int = 1
    over: int = 1
    least: int = 1

    def of(self, channels: int) -> int:
        return max(self.least, self.times * channels // self.over)


Arguments = dict[str, int | float | bool]


class LayerSpec(NamedTuple):
    """A plain module: one of modules.LAYER_KINDS or a user's `module:name`, and its arguments."""

    name: str
    kind: str
    arguments: Arguments


CHANNELS = Width()
NARROW = Width(over=4, least=8)
REDUCED = Width(over=4)


@dataclass(frozen=True)
class Start:
    """How the numbers of a parameter tensor begin."""

    value: float = 0.0
    spread: bool = False  # by U(-1, 1) / sqrt(fan_in) around the value, as torch's layers begin
    cleared: bool = False  # at 0 instead, in a seed that is germinated with MULTIPLY

    def tensor(self, shape: tuple[int, ...], fan_in: int = 1) -> Parameter:
        """A parameter tensor of `shape`, in a layer of which an output sums up `fan_in` inputs."""
        bound = 1.0 / math.sqrt(fan_in) if self.spread else 0.0
        return Parameter(shape, bound, self.value, cleared=self.cleared)


SPREAD = Start(spread=True)
ZEROS = Start()
ONES = Start(1.0)


def norm_parameters(channels: int) -> tuple[Parameter, ...]:
    """Scale and shift of a norm."""
    return ONES.tensor((channels,)), ZEROS.tensor((channels,))


def linear_parameters(
    inputs: int, outputs: int, start: Start = SPREAD, bias: bool = True
) -> tuple[Parameter, ...]:
    """Weight [O, I] and, where asked for, bias [O] of a linear layer."""
    shapes = ((outputs, inputs), (outputs,)) if bias else ((outputs, inputs),)
    return tuple(start.tensor(shape, inputs) for shape in shapes)


def _check_kernel(size: int) -> None:
    if size < 1 or size % 2 == 0:
        allowed = "odd, so that padding can leave an image its size"
        raise ValueError(f"a kernel of {size} pixels: must be {allowed}")


def _group_norm(channels: int) -> Arguments:
    return {"num_groups": norm_groups(channels), "num_channels": channels, "eps": NORM_EPS}


def convolution(inputs: int, outputs: int, kernel: int, groups: int = 1) -> LayerSpec:
    """A same-padded convolution without bias."""
    sizes: Arguments = {"in_channels": inputs, "out_channels": outputs, "kernel_size": kernel}
    sizes |= {"padding": kernel // 2, "groups": groups, "bias": False}
    return LayerSpec("conv", "Conv2d", sizes)


class Part(ABC):
    """A part of a seed; C = `channels` are those of the slot."""

    topology: str = IMAGES  # kind of the features that it takes and gives

    def outputs_of(self, inputs: int, channels: int) -> int:
        """Channels that come out of `inputs` channels: as many, where a part does not say more."""
        return inputs

    @abstractmethod
    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """Parameter tensors of a network, in row order."""

    @abstractmethod
    def products(self, inputs: int, channels: int, positions: int) -> int:
        """Multiplications of a sample with so many positions; norms are not counted."""

    @abstractmethod
    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        """Modules one after the other, with `parameters` in their order."""

    @abstractmethod
    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        """Output [B, m*O, ...] for m networks; parameters [m, ...], x [B, m*I, ...]."""


@dataclass(frozen=True)
class Conv(Part):
    """Same-padded convolution, then group norm and ReLU where asked for."""

    outputs: Width = CHANNELS
    kernel: int = 3  # pixels along a side, odd
    norm: bool = True
    relu: bool = True
    start: Start = SPREAD  # of the kernel

    def __post_init__(self) -> None:
        _check_kernel(self.kernel)

    def outputs_of(self, inputs: int, channels: int) -> int:
        return self.outputs.of(channels)

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """Kernel [O, I, k, k], then scale and shift [O] of the norm."""
        outputs = self.outputs.of(channels)
        shape = (outputs, inputs, self.kernel, self.kernel)
        kernel = self.start.tensor(shape, math.prod(shape[1:]))
        return (kernel, *norm_parameters(outputs)) if self.norm else (kernel,)

    def products(self, inputs: int, channels: int, positions: int) -> int:
        """Padding is counted."""
        return positions * self.outputs.of(channels) * inputs * self.kernel**2

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        outputs = self.outputs.of(channels)
        norm = (LayerSpec("norm", "GroupNorm", _group_norm(outputs)),) if self.norm else ()
        relu = (LayerSpec("relu", "ReLU", {}),) if self.relu else ()
        return convolution(inputs, outputs, self.kernel), *norm, *relu

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        kernel, *norm = parameters
        out = batched.conv2d(x, kernel)
        if norm:
            out = batched.group_norm(out, norm_groups(kernel.shape[1]), *norm)
        return F.relu(out, inplace=True) if self.relu else out


@dataclass(frozen=True)
class Depthwise(Part):
    """Same-padded convolution of every channel by itself."""

    kernel: int = 3  # pixels along a side, odd
    start: Start = SPREAD

    def __post_init__(self) -> None:
        _check_kernel(self.kernel)

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """Kernel [I, 1, k, k]."""
        return (self.start.tensor((inputs, 1, self.kernel, self.kernel), self.kernel**2),)

    def products(self, inputs: int, channels: int, positions: int) -> int:
        return positions * inputs * self.kernel**2

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        return (convolution(inputs, inputs, self.kernel, groups=inputs),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        return batched.conv2d(x, *parameters)


@dataclass(frozen=True)
class SoftNorm(Part):
    """x + tanh(strength) (group norm(x) - x)."""

    start: Start = ZEROS  # of the strength: at 0 it changes nothing

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """Strength [], then scale and shift [I] of the norm."""
        return self.start.tensor(()), *norm_parameters(inputs)

    def products(self, inputs: int, channels: int, positions: int) -> int:
        return 0

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        return (LayerSpec("soft_norm", "SoftNorm", _group_norm(inputs)),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        strength, scale, shift = parameters
        factor = batched.per_channel(torch.tanh(strength), scale.shape[1])
        normalised = batched.group_norm(x, norm_groups(scale.shape[1]), scale, bias=shift)
        return x + factor * (normalised - x)


@dataclass(frozen=True)
class Squeeze:
    """Numbers in (0, 1) per image: mean of its pixels, linear, ReLU, linear, sigmoid; no Part."""

    hidden: Width
    hidden_bias: bool = True
    start: Start = SPREAD  # of the second layer's weight
    bias_start: Start = SPREAD  # and of its bias

    def parameters(self, inputs: int, outputs: int, channels: int) -> tuple[Parameter, ...]:
        """Weight [H, I] and, where it has one, bias [H], then weight [O, H] and bias [O]."""
        hidden = self.hidden.of(channels)
        first = linear_parameters(inputs, hidden, bias=self.hidden_bias)
        second = linear_parameters(hidden, outputs, self.start, bias=False)
        return *first, *second, self.bias_start.tensor((outputs,), hidden)

    def products(self, inputs: int, outputs: int, channels: int) -> int:
        """Multiplications of an image; the mean is not counted."""
        return (inputs + outputs) * self.hidden.of(channels)

    def layer(self, kind: str, inputs: int, outputs: int, channels: int) -> LayerSpec:
        """A module of the `kind` Squeeze, or of one that is made like it."""
        hidden = self.hidden.of(channels)
        sizes: Arguments = {"inputs": inputs, "hidden": hidden, "outputs": outputs}
        return LayerSpec(kind.lower(), kind, sizes | {"hidden_bias": self.hidden_bias})

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        """Numbers [B, m, O] of features x [B, m*I, ...]."""
        first, *hidden_bias, second, bias = parameters
        mean = batched.spatial_mean(x, first.shape[0])
        hidden = F.relu(batched.linear(mean, first, *hidden_bias))
        return torch.sigmoid(batched.linear(hidden, second, bias))


@dataclass(frozen=True)
class Excite(Part):
    """x times a number per channel and image, from a squeeze of x (Hu et al. 2018)."""

    squeeze: Squeeze

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        return self.squeeze.parameters(inputs, inputs, channels)

    def products(self, inputs: int, channels: int, positions: int) -> int:
        """Products of the squeeze; scaling the pixels is not counted."""
        return self.squeeze.products(inputs, inputs, channels)

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        return (self.squeeze.layer("Excite", inputs, inputs, channels=channels),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        return x * self.squeeze.forward(parameters, x).flatten(1)[..., None, None]


KernelPart = Conv | Depthwise | SoftNorm | Excite  # that engines with kernels know


def are_parts(value: object) -> bool:
    """Whether it is a tuple of parts that is not empty."""
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(part, Part) for part in value)
