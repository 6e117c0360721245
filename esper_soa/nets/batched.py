"""Operations of n networks at once, on activations [B, n*C, H, W] in channels_last memory, by
parameters with an axis [n]: a grouped convolution, a batch norm of n*C channels, a batched product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same-padded convolution of x [B, n*I, H, W] with weight [n, O, I, k, k], bias [n, O]:
    [B, n*O, H, W]; one dense convolution of x [B, I, H, W], the same images for every network;
    depthwise with weight [n, C, 1, k, k].
    """
    flat = None if bias is None else bias.reshape(-1)
    groups = x.shape[1] // weight.shape[2]
    return F.conv2d(x, weight.flatten(0, 1), flat, padding=weight.shape[-1] // 2, groups=groups)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, n, I] with weight [n, O, I] and bias [n, O] -> [B, n, O]."""
    rows = x.transpose(0, 1)
    columns = weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(rows, columns).transpose(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), rows, columns).transpose(0, 1)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Training batch norm of x [B, n*C, H, W]; weight, bias [n, C]; moves mean and var [n*C].

    torch 2.13's CPU backward of a channels_last batch norm takes weights for contiguous, which
    those of networks of one channel, columns of a pool, are not.
    """
    scale = weight.reshape(-1).contiguous()
    return F.batch_norm(x, mean, var, scale, bias.reshape(-1), True, BATCH_NORM_MOMENTUM, NORM_EPS)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Group norm of x [B, n*C, H, W] with `groups` groups per network; weight, bias [n, C].

    torch 2.13's CPU backward of a channels_last group norm crashes the process where the input
    needs no gradient, so such an input goes in as [B, n*C, H*W], which has no channels_last form.
    """
    flat = x.flatten(2) if torch.is_grad_enabled() and not x.requires_grad else x
    num_groups = weight.shape[0] * groups
    out = F.group_norm(flat, num_groups, weight.reshape(-1), bias.reshape(-1), NORM_EPS)
    return out.view(x.shape) if flat is not x else out


def spatial_mean(x: Tensor, num_nets: int) -> Tensor:
    """Means [B, n, C] of the positions of x [B, n*C, H, W] or [B, n*C, T]; vectors [B, n*C] as they
    are. A network's rounding does not depend on the other networks.
    """
    image = x[(..., *[None] * (4 - x.dim()))]
    return F.adaptive_avg_pool2d(image, 1).flatten(1).unflatten(1, (num_nets, -1))


def flatten_targets(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., B, n, K, C] and labels [B, n, K] as those of B*K samples with a target each:
    [..., B*K, n, C] and [B*K, n]. With labels [B, n] both as they are.
    """
    if labels.ndim == 2:
        return logits, labels
    return logits.transpose(-3, -2).flatten(-4, -3), labels.transpose(1, 2).flatten(0, 1)


def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy [n] of logits [B, n, C] for labels [B, n], or [B, n, K, C] for [B, n, K]
    of samples with K targets; right answers, int64 [n].
    """
    logits, labels = flatten_targets(logits, labels)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.unflatten(0, labels.shape)
    return losses.mean(0), (logits.detach().argmax(-1) == labels).sum(0)


def per_channel(values: Tensor, num_channels: int, axes: int = 2) -> Tensor:
    """Numbers per network [..., n] for activations with `axes` behind C: [..., n*C, 1, 1]."""
    every = values.unsqueeze(-1).expand(*values.shape, num_channels).flatten(-2)
    return every[(..., *[None] * axes)]


def interpolate(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """x + factor (other - x) of activations [B, n*C, ...], factor [..., n]; in the format of x."""
    factors = per_channel(factor, x.shape[1] // factor.shape[-1], x.dim() - 2)
    return torch.lerp(x.to(factors.dtype), other.to(factors.dtype), factors).to(x.dtype)


def select_nets(x: Tensor, nets: Tensor | None, num_nets: int) -> Tensor:
    """Activations [B, m*C, ...] of networks `nets` (int64 [m]; None = all) of x [B, n*C, ...]."""
    if nets is None:
        return x
    selected = x.movedim(1, -1).unflatten(-1, (num_nets, -1)).index_select(-2, nets)
    return selected.flatten(-2).movedim(-1, 1)


def put_nets(x: Tensor, nets: Tensor, num_nets: int, values: Tensor) -> Tensor:
    """x [B, n*C, ...] with those of `nets` (int64 [m]) replaced by `values` [B, m*C, ...]."""
    target = x.movedim(1, -1).unflatten(-1, (num_nets, -1))
    source = values.movedim(1, -1).unflatten(-1, (nets.shape[0], -1))
    return target.index_copy(-2, nets, source).flatten(-2).movedim(-1, 1)
