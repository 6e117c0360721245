"""Seeds and gates in torch: what the parts of nets/model/parts.py mean, for m networks at once.

Features are [B, m*C, H, W]; parameters are tensors with a leading [m] axis. Given a blueprint and
the unpacked rows of its seeds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.model.blueprints import Architecture
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


def seed_forward(blueprint: Architecture, parameters: list[Tensor], x: Tensor) -> Tensor:
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
        out = _part_forward(part, own, out, residual)
    return out


def _part_forward(
    part: Part, parameters: list[Tensor], x: Tensor, residual: Tensor | None
) -> Tensor:
    """Output [B, m*O, H, W] of one part of m seeds, plus `residual` where there is one."""
    match part:
        case Conv():
            kernel, *norm = parameters
            out = batched.conv2d(x, kernel)
            if norm:
                out = batched.group_norm(out, norm_groups(kernel.shape[1]), *norm)
            out = F.relu(out, inplace=True) if part.relu else out
        case Depthwise():
            out = batched.depthwise_conv2d(x, *parameters)
        case SoftNorm():
            strength, scale, shift = parameters
            factor = batched.per_channel(torch.tanh(strength), scale.shape[1])
            normalised = batched.group_norm(x, norm_groups(scale.shape[1]), scale, shift)
            out = x + factor * (normalised - x)
        case Excite():
            out = x * _squeeze(parameters, x).flatten(1)[..., None, None]
    return out if residual is None else residual + out


def _squeeze(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Numbers [B, m, O] in (0, 1); parameters as of parts.Squeeze, three or four tensors."""
    first, *hidden_bias, second, bias = parameters
    hidden = F.relu(batched.linear(batched.spatial_mean(x, first.shape[0]), first, *hidden_bias))
    return torch.sigmoid(batched.linear(hidden, second, bias))


def gate_forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Gate [B, m] in (0, 1) of features x [B, m*C, H, W]; `parameters` as of `gate_table`."""
    return _squeeze(parameters, x).squeeze(-1)
