"""Seeds and gates in torch: what the parts of nets/model/parts.py mean, for m networks at once.

Features are [B, m*C, H, W]; parameters are tensors with a leading [m] axis. Given a blueprint and
the unpacked rows of its seeds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.layers import GroupNorm, Layers
from esper_soa.nets.model.parts import (
    Conv,
    Depthwise,
    Excite,
    Part,
    SoftNorm,
    norm_groups,
    num_tensors,
)
from esper_soa.nets.model.user_module import UserModule
from esper_soa.nets.seeds import blend


def seed_forward(
    layers: Layers, blueprint: Architecture, parameters: list[Tensor], x: Tensor
) -> Tensor:
    """Output [B, m*C, H, W] of m seeds; `parameters` as unpacked by `seed_table`."""
    if blueprint.module is not None:
        return blueprint.module.forward(parameters, x)
    out = x
    last = len(blueprint.parts) - 1
    rest = parameters
    for place, part in enumerate(blueprint.parts):
        assert not isinstance(part, UserModule)  # which stands alone
        own = rest[: num_tensors(part)]
        rest = rest[num_tensors(part) :]
        residual = x if blueprint.residual and place == last else None
        out = _part_forward(layers, part, own, out, residual)
    return out


def _part_forward(
    layers: Layers, part: Part, parameters: list[Tensor], x: Tensor, residual: Tensor | None
) -> Tensor:
    """Output [B, m*O, H, W] of one part of m seeds, plus `residual` where there is one."""
    match part:
        case Conv(norm=True):
            kernel, scale, shift = parameters
            return layers.seed_layer(x, kernel, _norm(scale, shift, part.relu), residual)
        case Conv():
            out = layers.conv2d(x, *parameters)
            out = F.relu(out, inplace=True) if part.relu else out
        case Depthwise():
            out = batched.depthwise_conv2d(x, *parameters)
        case SoftNorm():
            strength, scale, shift = parameters
            factor = batched.per_channel(torch.tanh(strength), scale.shape[1])
            normed = batched.group_norm(x, norm_groups(scale.shape[1]), scale, shift)
            out = x + factor * (normed - x)
        case Excite():
            out = x * _squeeze(parameters, x).flatten(1)[..., None, None]
    return out if residual is None else residual + out


def _norm(scale: Tensor, shift: Tensor, relu: bool) -> GroupNorm:
    return GroupNorm(scale, shift, norm_groups(scale.shape[1]), relu)


def _squeeze(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Numbers [B, m, O] in (0, 1); parameters as of parts.Squeeze, three or four tensors."""
    first, *hidden_bias, second, bias = parameters
    hidden = F.relu(batched.linear(batched.spatial_mean(x, first.shape[0]), first, *hidden_bias))
    return torch.sigmoid(batched.linear(hidden, second, bias))


def gate_forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Gate [B, m] in (0, 1) of features x [B, m*C, H, W]; `parameters` as of `gate_table`."""
    return _squeeze(parameters, x).squeeze(-1)


def seed_added(
    layers: Layers,
    blueprint: Architecture,
    parameters: list[Tensor],
    host: Tensor,
    alpha: Tensor,
    detached: bool,
    pooled: bool = False,
) -> Tensor:
    """host [B, m*C, H, W] moved by alpha [m] towards the seeds' output: ADD, in one step where a
    kernel has it.

    detached: the seeds see the host's features cut off from its graph. pooled: a 2x2 max pool
    follows.
    """
    layer = blueprint.single_layer
    if layer is not None:
        kernel, scale, shift = parameters
        norm = _norm(scale, shift, layer.relu)
        return layers.added_layer(host, kernel, norm, alpha, detached, pooled)
    seen = host.detach() if detached else host
    out = blend.add(host, seed_forward(layers, blueprint, parameters, seen), alpha)
    return layers.max_pool(out) if pooled else out
