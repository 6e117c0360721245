"""Convolutional seeds on a GPU as a differentiable function of activations and parameter rows.

Given activations of all N networks and a device-built list of those whose seed lives; launches the kernels of seed.py
and, for what comes after the group norm's backward pass, those of block.py. Equals blueprints.seed_forward followed by
blend.add or blend.straight_through, up to rounding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets import batched
from esper_soa.nets.engines.gpu import block, seed
from esper_soa.nets.engines.gpu.block import Upstream
from esper_soa.nets.engines.gpu.block_autograd import weight_gradient
from esper_soa.nets.engines.gpu.seed import SeedGradients, Seeds
from esper_soa.nets.engines.gpu.tiles import layer_of, plane, rows, tile_of


class ConvSeed(NamedTuple):
    """How the listed seeds of one slot run; all of one blueprint (conv_small or conv_light) and one way in."""

    live: Tensor  # int32 [capacity], from `live_list`
    alpha: Tensor  # [N]; read where not `through`
    groups: int  # of the group norm
    through: bool  # straight-through pass: the host does not see the seed, the seed sees the whole gradient
    detached: bool  # no gradient from the seed's input into the host


def live_list(live: Tensor) -> Tensor:
    """int32 [N]: the networks whose `live` (bool [N]) is set, in order, then -1. Nothing is read by the host."""
    count = live.shape[0]
    place = torch.where(live, live.cumsum(0) - 1, count)
    numbers = torch.arange(count, device=live.device, dtype=torch.int32)
    empty = torch.full((count + 1,), -1, dtype=torch.int32, device=live.device)
    return empty.scatter(0, place, numbers)[:count].contiguous()


def conv_seed(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, how: ConvSeed) -> Tensor:
    """Activations [B, N*C, H, W] after the slot; weight [N, C, C, k, k], scale and shift [N, C] are views of pool rows.

    Networks that are not listed keep theirs, and their parameters get a gradient of zero.
    """
    return _ConvSeed.apply(x, weight, scale, shift, how)


def added_seed(
    x: Tensor, weight: Tensor, affine: tuple[Tensor, Tensor], groups: int, alpha: Tensor, detached: bool
) -> Tensor:
    """x [B, m*C, H, W] moved by alpha [m] towards x + ReLU(group norm(convolution(x))) for all m networks.

    affine: scale and shift [m, C] of the group norm; detached: no gradient from the seed's input into the host.
    """
    everyone = torch.arange(alpha.shape[0], dtype=torch.int32, device=x.device)
    return conv_seed(x, weight, *affine, ConvSeed(everyone, alpha, groups, False, detached))


class _ConvSeed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, how: ConvSeed
    ) -> Tensor:
        ctx.save_for_backward(x, weight, scale, shift)
        ctx.how = how  # type: ignore[attr-defined]
        if how.through:
            return x.view_as(x)
        num_nets, layer = weight.shape[0], layer_of(x, weight, 1)
        target = x.clone(memory_format=torch.channels_last)
        tile = tile_of(layer, x.shape[2] * x.shape[3], x.dtype)
        seeds = _seeds(x, weight, scale, shift, how)
        grid = (x.shape[0], how.live.shape[0])
        seed.seed_forward_kernel[grid](plane(target, num_nets), seeds, layer, tile)
        return target

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, shift = ctx.saved_tensors  # type: ignore[attr-defined]
        how, num_nets, layer = ctx.how, weight.shape[0], layer_of(x, weight, 1)  # type: ignore[attr-defined]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        inner = torch.empty_like(gradient)
        affine = scale.new_zeros(num_nets, x.shape[0], 2, scale.shape[1], dtype=torch.float32)
        written = SeedGradients(plane(gradient, num_nets), plane(inner, num_nets), affine)
        tile = tile_of(layer, x.shape[2] * x.shape[3], x.dtype)
        grid = (x.shape[0], how.live.shape[0])
        seeds = _seeds(x, weight, scale, shift, how)
        seed.seed_backward_kernel[grid](seeds, written, layer, tile)
        upstream = Upstream(written.convolution)
        weights = weight_gradient(upstream, plane(x, num_nets), weight, how.live, layer).to(weight.dtype)
        x_gradient = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            x_gradient = _host_gradient(gradient, how, num_nets)
            if not how.detached:
                tile = tile_of(layer, layer.num_pixels, x.dtype)
                grid = (triton.cdiv(layer.num_pixels, tile.pixels.value), how.live.shape[0])
                block.input_gradient_kernel[grid](
                    upstream, rows(weight), plane(x_gradient, num_nets), how.live, layer, tile
                )
        moved = affine.sum(1).to(scale.dtype)
        return x_gradient, weights, moved[:, 1], moved[:, 0], None


def _seeds(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, how: ConvSeed) -> Seeds:
    factor = torch.ones_like(how.alpha) if how.through else how.alpha
    groups = tl.constexpr(how.groups)
    return Seeds(plane(x, weight.shape[0]), how.live, rows(weight), rows(scale), rows(shift), factor.float(), groups)


def _host_gradient(gradient: Tensor, how: ConvSeed, num_nets: int) -> Tensor:
    """The gradient's way past the convolution: host and residual, less what a detached seed keeps for itself."""
    if how.detached == how.through:
        return gradient.clone(memory_format=torch.channels_last)
    listed = torch.zeros(num_nets + 1, dtype=torch.bool, device=gradient.device)
    listed.scatter_(0, how.live.long() % (num_nets + 1), torch.ones_like(how.live, dtype=torch.bool))
    factor = 2.0 if how.through else 1 - how.alpha
    kept = torch.where(listed[:num_nets], factor, 1.0).to(gradient.dtype)
    return gradient * batched.per_channel(kept, gradient.shape[1] // num_nets)
