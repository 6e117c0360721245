"""The seed modules as one table: parameters, initialisation and forward pass of every CNN blueprint.

A seed maps activations [B, m*C, H, W] of m networks to the same shape. Deliberate difference from the reference: where
a zero initialisation would give a seed zero gradients for ever (conv_small; MULTIPLY with depthwise, conv_light or
conv_heavy), the default initialisation stands.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched, blend
from esper_soa.nets.model.parameters import Parameter, Table, norm_scale, offset, weight, zeros
from esper_soa.vocabulary import BLUEPRINT_NAMES, NUM_BLUEPRINTS, Blueprint

CHANNELS_PER_GROUP = 16


def norm_groups(channels: int) -> int:
    """Groups of a group norm: the most of 32, 16, ... that leave 16 channels or more, else the most that divide."""
    divisors = [groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0]
    roomy = [groups for groups in divisors if channels // groups >= CHANNELS_PER_GROUP]
    return (roomy or divisors)[0]


def _group_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return batched.group_norm(x, norm_groups(scale.shape[1]), scale, shift)


def _norm_of(scale: Tensor, shift: Tensor, relu: bool = True) -> batched.GroupNorm:
    return batched.GroupNorm(scale, shift, norm_groups(scale.shape[1]), relu)


def _layer(parameters: list[Tensor], x: Tensor, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    """Convolution, group norm, ReLU, residual; parameters = kernel, scale, shift."""
    kernel, scale, shift = parameters
    return batched.seed_layer(x, kernel, _norm_of(scale, shift, relu), residual)


def _noop_table(channels: int) -> tuple[Parameter, ...]:
    return ()


def _noop(parameters: list[Tensor], x: Tensor) -> Tensor:
    return x


def _norm_table(channels: int) -> tuple[Parameter, ...]:
    return zeros(), norm_scale(channels), zeros(channels)


def _norm(parameters: list[Tensor], x: Tensor) -> Tensor:
    strength, scale, shift = parameters
    share = batched.per_channel(torch.tanh(strength), scale.shape[1])
    return x + share * (_group_norm(x, scale, shift) - x)


def _attention_table(channels: int) -> tuple[Parameter, ...]:
    reduced = max(1, channels // 4)
    return weight(reduced, channels), zeros(channels, reduced), Parameter((channels,), value=3.0)


def _attention(parameters: list[Tensor], x: Tensor) -> Tensor:
    squeeze, excite, bias = parameters
    pooled = batched.spatial_mean(x, squeeze.shape[0])
    scale = torch.sigmoid(batched.linear(F.relu(batched.linear(pooled, squeeze)), excite, bias))
    return x * scale.flatten(1)[..., None, None]


def _depthwise_table(channels: int) -> tuple[Parameter, ...]:
    return weight(channels, 1, 3, 3), weight(channels, channels, 1, 1), norm_scale(channels), zeros(channels)


def _depthwise(parameters: list[Tensor], x: Tensor) -> Tensor:
    depth, point, scale, shift = parameters
    return _layer([point, scale, shift], batched.depthwise_conv2d(x, depth), x)


def narrow_channels(channels: int) -> int:
    """Channels inside of a bottleneck."""
    return max(8, channels // 4)


def _bottleneck_table(channels: int) -> tuple[Parameter, ...]:
    narrow = narrow_channels(channels)
    return (
        weight(narrow, channels, 1, 1),
        weight(narrow, narrow, 3, 3),
        zeros(channels, narrow, 1, 1),
        norm_scale(channels),
        zeros(channels),
    )


def _bottleneck(parameters: list[Tensor], x: Tensor) -> Tensor:
    down, kernel, up, scale, shift = parameters
    narrow = F.relu(batched.conv2d(x, down), inplace=True)
    narrow = F.relu(batched.conv2d(narrow, kernel), inplace=True)
    return _layer([up, scale, shift], narrow, x, relu=False)


def _conv_table(channels: int, kernel: int) -> tuple[Parameter, ...]:
    return weight(channels, channels, kernel, kernel), norm_scale(channels), zeros(channels)


def _conv_small_table(channels: int) -> tuple[Parameter, ...]:
    return _conv_table(channels, 1)


def _conv_light_table(channels: int) -> tuple[Parameter, ...]:
    return _conv_table(channels, 3)


def _conv_heavy_table(channels: int) -> tuple[Parameter, ...]:
    return _conv_table(channels, 3) + _conv_table(channels, 3)


def _conv(parameters: list[Tensor], x: Tensor) -> Tensor:
    return _layer(parameters, x, x)


def _conv_heavy(parameters: list[Tensor], x: Tensor) -> Tensor:
    return _layer(parameters[3:], _layer(parameters[:3], x), x)


class Row(NamedTuple):
    """One blueprint: its parameters for C channels, its forward pass, and what MULTIPLY starts at zero."""

    code: int
    parameters: Callable[[int], tuple[Parameter, ...]]
    forward: Callable[[list[Tensor], Tensor], Tensor]
    multiply_zeros: tuple[int, ...] = ()  # parameters that are zero in a seed germinated with MULTIPLY


ROWS = (
    Row(Blueprint.NOOP, _noop_table, _noop),
    Row(Blueprint.CONV_LIGHT, _conv_light_table, _conv),
    Row(Blueprint.ATTENTION, _attention_table, _attention, (1, 2)),
    Row(Blueprint.NORM, _norm_table, _norm),
    Row(Blueprint.DEPTHWISE, _depthwise_table, _depthwise),
    Row(Blueprint.BOTTLENECK, _bottleneck_table, _bottleneck, (2,)),
    Row(Blueprint.CONV_SMALL, _conv_small_table, _conv),
    Row(Blueprint.CONV_HEAVY, _conv_heavy_table, _conv_heavy),
)
BY_CODE = {row.code: row for row in ROWS}


def seed_table(blueprint: int, channels: int) -> Table:
    """Parameters of a seed; raises KeyError for a code that is no CNN blueprint (noop has none)."""
    return Table(BY_CODE[blueprint].parameters(channels))


def seed_forward(blueprint: int, parameters: list[Tensor], x: Tensor) -> Tensor:
    """Output [B, m*C, H, W] of m seeds; `parameters` as unpacked by `seed_table`."""
    return BY_CODE[blueprint].forward(parameters, x)


def seed_added(
    blueprint: int, parameters: list[Tensor], host: Tensor, alpha: Tensor, detached: bool, pooled: bool = False
) -> Tensor:
    """host [B, m*C, H, W] moved by alpha [m] towards the seeds' output: ADD, in one step where a kernel has it.

    detached: the seeds see the host's activations cut off from its graph. pooled: a 2x2 max pool follows.
    """
    if blueprint in (Blueprint.CONV_LIGHT, Blueprint.CONV_SMALL):
        kernel, scale, shift = parameters
        return batched.added_layer(host, kernel, _norm_of(scale, shift), alpha, detached, pooled)
    seen = host.detach() if detached else host
    out = blend.add(host, seed_forward(blueprint, parameters, seen), alpha)
    return batched.max_pool(out) if pooled else out


def gate_table(channels: int) -> Table:
    """Parameters of the gate network that GATE adds: global mean -> linear -> ReLU -> linear -> sigmoid."""
    hidden = max(8, channels // 4)
    return Table((weight(hidden, channels), offset(hidden, channels), weight(1, hidden), offset(1, hidden)))


def gate_forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Gate [B, m] in (0, 1) of activations x [B, m*C, H, W]."""
    hidden_weight, hidden_bias, out_weight, out_bias = parameters
    pooled = batched.spatial_mean(x, hidden_weight.shape[0])
    hidden = F.relu(batched.linear(pooled, hidden_weight, hidden_bias))
    return torch.sigmoid(batched.linear(hidden, out_weight, out_bias)).squeeze(-1)


def initial_seeds(blueprint: int, channels: int, keys: Tensor, multiply: Tensor, dtype: torch.dtype) -> Tensor:
    """Fresh rows [m, parameters] of seeds from streams `keys` (int64 [m]); multiply: bool [m], blended by MULTIPLY."""
    table = seed_table(blueprint, channels)
    zeroed = BY_CODE[blueprint].multiply_zeros
    flags = [torch.full((size,), index in zeroed) for index, size in enumerate(table.sizes)]
    cleared = torch.cat(flags).to(keys.device)
    rows = table.initial(keys, dtype)
    return torch.where(multiply[:, None] & cleared, torch.zeros_like(rows), rows)


def parameter_counts(channels: int) -> list[int]:
    """Trainable parameters by blueprint code; 0 for codes that are no CNN blueprint."""
    return [seed_table(code, channels).total if code in BY_CODE else 0 for code in range(NUM_BLUEPRINTS)]


def blueprint_codes(names: list[str]) -> tuple[int, ...]:
    """Codes of blueprint names."""
    return tuple(BLUEPRINT_NAMES.index(name) for name in names)
