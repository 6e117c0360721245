"""Layers of n networks at once: activations [B, n*C, H, W] in channels_last memory, parameters with a leading [n] axis.

The only place that picks kernels: a convolution of n networks is one operation (formulations.py), their batch norms are
one batch norm over n*C channels, their linear layers one batched matrix product. Used by host, blueprints and blend.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import formulations
from esper_soa.nets.native import block, head, pool, seed, switch
from esper_soa.nets.native.library import LANES
from esper_soa.nets.native.seed import GroupNorm, Joined
from esper_soa.nets.triton_kernels import switch as triton_switch

NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same-padded convolution of x [B, n*I or I, H, W] with weight [n, O, I, k, k], bias [n, O] -> [B, n*O, H, W]."""
    return formulations.convolve(x, weight, bias)


def depthwise_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Same-padded depthwise convolution of x [B, n*C, H, W] with weight [n, C, 1, k, k]."""
    return F.conv2d(x, weight.flatten(0, 1), padding=weight.shape[-1] // 2, groups=x.shape[1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, n, I] with weight [n, O, I] and bias [n, O] -> [B, n, O]."""
    rows, columns = x.transpose(0, 1), weight.transpose(1, 2)
    out = torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, columns)
    return out.transpose(0, 1)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Training batch norm of x [B, n*C, H, W]; weight, bias [n, C]; moves mean and var [n*C] in place.

    torch 2.13's CPU backward of a channels_last batch norm takes weights for contiguous, which those of networks of one
    channel, columns of a pool, are not.
    """
    scale, shift = weight.reshape(-1).contiguous(), bias.reshape(-1)
    return F.batch_norm(x, mean, var, scale, shift, True, BATCH_NORM_MOMENTUM, NORM_EPS)


def _even(x: Tensor, pooled: bool) -> bool:
    return not pooled or (x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0)


def _native(x: Tensor, weight: Tensor) -> bool:
    """Whether the native kernels take a convolution of x with weight [n, O, ...].

    They work on whole vectors of channels: narrower layers are quicker in torch as soon as they are differentiated.
    """
    return switch.takes(x) and (weight.shape[1] >= LANES or not torch.is_grad_enabled())


def train_block(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor], pooled: bool
) -> Tensor:
    """Convolution, batch norm, ReLU and 2x2 max pool, training; x [B, n*I, H, W] -> [B, n*O, H or H/2, W or W/2].

    norm = scale and shift [n, O]; running = mean and variance [n*O], moved in place.
    """
    gpu = triton_switch.kernels_for(x)
    if gpu is not None:
        return gpu.conv_norm_relu_pool(x, weight, gpu.Norm(*norm, *running), 2 if pooled else 1)
    if _native(x, weight) and _even(x, pooled):
        moving = block.Statistics(*running, BATCH_NORM_MOMENTUM, NORM_EPS)
        return block.train_block(x, weight, norm, moving, pooled)
    x = batch_norm(conv2d(x, weight), *norm, *running)
    return F.relu(F.max_pool2d(x, 2) if pooled else x, inplace=True)


def infer_block(x: Tensor, weight: Tensor, bias: Tensor, pooled: bool) -> Tensor:
    """Convolution, ReLU and 2x2 max pool, no gradients; x [B, n*I or I, H, W] -> [B, n*O, H or H/2, W or W/2]."""
    gpu = triton_switch.kernels_for(x)
    if gpu is not None:
        return gpu.evaluate_conv_relu_pool(x, weight, bias, 2 if pooled else 1)
    if _native(x, weight) and _even(x, pooled):
        return block.infer_block(x, weight, bias, pooled)
    x = conv2d(x, weight, bias)
    return F.relu(F.max_pool2d(x, 2) if pooled else x, inplace=True)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """Group norm of x [B, n*C, H, W] with `groups` groups per network; weight, bias [n, C].

    torch 2.13's CPU backward of a channels_last group norm crashes the process where the input needs no gradient, so
    such an input goes in as [B, n*C, H*W], which has no channels_last form.
    """
    scale, shift, num_groups = weight.reshape(-1), bias.reshape(-1), weight.shape[0] * groups
    if torch.is_grad_enabled() and not x.requires_grad:
        return F.group_norm(x.flatten(2), num_groups, scale, shift, NORM_EPS).unflatten(2, x.shape[2:])
    return F.group_norm(x, num_groups, scale, shift, NORM_EPS)


def seed_layer(x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None = None) -> Tensor:
    """Convolution, group norm and ReLU of x [B, n*I, H, W] (see GroupNorm), plus residual [B, n*O, H, W]."""
    if _native(x, weight):
        return seed.seed_layer(x, weight, norm, Joined(residual))
    out = group_norm(conv2d(x, weight), norm.groups, norm.scale, norm.shift)
    out = F.relu(out, inplace=True) if norm.relu else out
    return out if residual is None else residual + out


def added_layer(
    x: Tensor, weight: Tensor, norm: GroupNorm, alpha: Tensor, detached: bool, pooled: bool = False
) -> Tensor:
    """x [B, n*C, H, W] moved by alpha [n] towards x + layer(x), and behind it a 2x2 max pool where `pooled`.

    detached: the seed sees x cut off from the graph.
    """
    gpu = triton_switch.kernels_for(x)
    if gpu is not None and norm.relu:
        out = gpu.added_seed(x, weight, (norm.scale, norm.shift), norm.groups, alpha, detached)
    elif _native(x, weight):
        within = pooled and _even(x, pooled)
        out = seed.seed_layer(x, weight, norm, Joined(x, alpha, detached, within))
        pooled = pooled and not within
    else:
        seen = x.detach() if detached else x
        out = mixed(x, seed_layer(seen, weight, norm, seen), alpha)
    return max_pool(out) if pooled else out


def max_pool(x: Tensor) -> Tensor:
    """2x2 max pool."""
    return pool.pool(x) if switch.takes(x) and pool.fits(x) else F.max_pool2d(x, 2)


def spatial_mean(x: Tensor, num_nets: int) -> Tensor:
    """x [B, n*C, H, W] -> [B, n, C]; the rounding of a network's mean does not depend on the other networks."""
    return F.adaptive_avg_pool2d(x, 1).flatten(1).unflatten(1, (num_nets, -1))


def classify(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Global mean and linear classifier: x [B, n*C, H, W], weight [n, K, C], bias [n, K] -> logits [B, n, K]."""
    return linear(spatial_mean(x, weight.shape[0]), weight, bias)


def classifier_loss(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy [n] of `classify` for labels [B, n], in the weights' dtype, and hits int64 [n]."""
    if switch.takes(x):
        return head.head_loss(x, weight, bias, labels)
    logits = classify(x, weight, bias).to(weight.dtype)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").unflatten(0, labels.shape)
    return losses.mean(0), (logits.detach().argmax(-1) == labels).sum(0)


def per_channel(values: Tensor, num_channels: int) -> Tensor:
    """One number per network [..., n] -> [..., n*C, 1, 1], ready to scale activations."""
    return values.unsqueeze(-1).expand(*values.shape, num_channels).flatten(-2)[..., None, None]


def mixed(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """x + share (other - x) of activations [B, n*C, H, W], share [..., n]; in its format, exact beside 16 bits."""
    shares = per_channel(share, x.shape[1] // share.shape[-1])
    return torch.lerp(x.to(shares.dtype), other.to(shares.dtype), shares).to(x.dtype)


def take_nets(x: Tensor, nets: Tensor | None, num_nets: int) -> Tensor:
    """Activations [B, m*C, H, W] of the networks `nets` (int64 [m]; None = all) out of x [B, n*C, H, W]."""
    if nets is None:
        return x
    picked = x.permute(0, 2, 3, 1).unflatten(3, (num_nets, -1)).index_select(3, nets)
    return picked.flatten(3).permute(0, 3, 1, 2)


def put_nets(x: Tensor, nets: Tensor | None, num_nets: int, values: Tensor) -> Tensor:
    """x [B, n*C, H, W] with the activations of `nets` (int64 [m]; None = all) replaced by values [B, m*C, H, W]."""
    if nets is None:
        return values
    pixels = x.permute(0, 2, 3, 1).unflatten(3, (num_nets, -1))
    source = values.permute(0, 2, 3, 1).unflatten(3, (nets.shape[0], -1))
    return pixels.index_copy(3, nets, source).flatten(3).permute(0, 3, 1, 2)
