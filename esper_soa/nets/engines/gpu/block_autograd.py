"""The host's block on a GPU as a differentiable function, and its evaluation with folded statistics.

Given activations of n networks in channels_last memory by layers.py; launches the kernels of block.py. What is
returned equals convolution, batch norm, max pool and ReLU of torch, up to rounding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.engines.gpu import block
from esper_soa.nets.engines.gpu.block import Upstream
from esper_soa.nets.engines.gpu.tiles import Layer, Plane, Rows, Tile, layer_of, plane, rows, shared_plane, tile_of

MAX_SPLITS = 64  # parts of a weight gradient's sum
PIXELS_PER_SPLIT = 1024


class Norm(NamedTuple):
    """A block's batch norm: scale and shift [n, C] are differentiated, running mean and var [n*C] move in place."""

    scale: Tensor
    shift: Tensor
    mean: Tensor
    var: Tensor


def conv_norm_relu_pool(x: Tensor, weight: Tensor, norm: Norm, pool: int) -> Tensor:
    """x [B, n*I, H, W] (or [B, I, H, W], shared) -> [B, n*O, H // pool, W // pool] with weight [n, O, I, k, k].

    pool: side of the window, 1 or 2.
    """
    return _Block.apply(x, weight, norm.scale, norm.shift, (norm.mean, norm.var), pool)


def evaluate_conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """The same block with batch norm folded into weight [n, O, I, k, k] and bias [n, O]; no gradients."""
    num_nets = weight.shape[0]
    layer = layer_of(x, weight, pool)
    out = pooled_like(x, layer, num_nets, x.dtype)
    pixels = out.shape[0] * out.shape[2] * out.shape[3]
    tile = tile_of(layer, pixels, x.dtype)
    grid = (triton.cdiv(pixels, tile.pixels.value), num_nets)
    block.evaluation_kernel[grid](plane_of(x, weight), rows(weight), rows(bias), plane(out, num_nets), layer, tile)
    return out


def plane_of(x: Tensor, weight: Tensor) -> Plane:
    """Activations of all networks, or the same ones for every network."""
    return plane(x, weight.shape[0]) if x.shape[1] == weight.shape[0] * weight.shape[2] else shared_plane(x)


def pooled_like(x: Tensor, layer: Layer, num_nets: int, dtype: torch.dtype) -> Tensor:
    """Memory for the pooled output [B, n*O, H // pool, W // pool] in channels_last."""
    pool, channels = layer.pool.value, num_nets * layer.outputs.value
    size = (x.shape[0], x.shape[2] // pool, x.shape[3] // pool, channels)
    return torch.empty(size, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


def weight_gradient(upstream: Upstream, x: Plane, weight: Tensor, live: Tensor | None, layer: Layer) -> Tensor:
    """Gradient float32 of weight [n, O, I, k, k], zero for networks that `live` does not list."""
    size = layer.size.value
    tile = tile_of(layer, layer.num_pixels, x.base.dtype)
    splits = min(MAX_SPLITS, triton.cdiv(layer.num_pixels, PIXELS_PER_SPLIT))
    make = torch.empty if live is None else torch.zeros
    shape = (weight.shape[0], splits, *weight.shape[1:])
    partials = make(shape, dtype=torch.float32, device=weight.device)
    column_tiles = triton.cdiv(layer.inputs.value * size * size, tile.columns.value)
    grid = (splits, column_tiles, weight.shape[0] if live is None else live.shape[0])
    block.weight_gradient_kernel[grid](upstream, x, partials, live, layer, tile)
    return partials.sum(1)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, running: tuple[Tensor, Tensor],
        pool: int,
    ) -> Tensor:  # fmt: skip
        num_nets, layer = weight.shape[0], layer_of(x, weight, pool)
        tile, outputs = tile_of(layer, layer.num_pixels, x.dtype), layer.outputs.value
        tiles = triton.cdiv(layer.num_pixels, tile.pixels.value)
        partials = weight.new_empty(num_nets, tiles, 2, outputs, dtype=torch.float32)
        statistics = weight.new_empty(2 * num_nets, outputs, dtype=torch.float32)
        output = pooled_like(x, layer._replace(pool=tl.constexpr(1)), num_nets, x.dtype)
        block.conv_kernel[tiles, num_nets](
            plane_of(x, weight), rows(weight), plane(output, num_nets), partials, layer, tile
        )
        moved = tuple(Rows(values, outputs) for values in running)
        block.statistics_kernel[num_nets,](partials, statistics, moved, tiles, layer, tile)
        pooled = pooled_like(x, layer, num_nets, x.dtype)
        codes = torch.empty_like(pooled, dtype=torch.uint8)
        affine = (rows(scale), rows(shift))
        block.norm_pool_kernel[_pooled_tiles(pooled, tile), num_nets](
            plane(output, num_nets), rows(statistics), affine, plane(pooled, num_nets), plane(codes, num_nets), layer,
            tile,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, scale, output, codes, statistics)
        ctx.layer = layer  # type: ignore[attr-defined]
        return pooled

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, output, codes, statistics = ctx.saved_tensors  # type: ignore[attr-defined]
        layer, num_nets = ctx.layer, weight.shape[0]  # type: ignore[attr-defined]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        coefficients = weight.new_empty(num_nets, 4, layer.outputs.value, dtype=torch.float32)
        upstream = Upstream(plane(gradient, num_nets), plane(output, num_nets), plane(codes, num_nets), coefficients)
        sums = _norm_sums(upstream, statistics, scale, layer)
        x_gradient = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            x_gradient = torch.empty_like(x)
            tile = tile_of(layer, layer.num_pixels, x.dtype)
            grid = (triton.cdiv(layer.num_pixels, tile.pixels.value), num_nets)
            block.input_gradient_kernel[grid](upstream, rows(weight), plane(x_gradient, num_nets), None, layer, tile)
        weights = weight_gradient(upstream, plane_of(x, weight), weight, None, layer)
        return x_gradient, weights.to(weight.dtype), sums[:, 1].to(scale.dtype), sums[:, 0].to(scale.dtype), None, None


def _pooled_tiles(pooled: Tensor, tile: Tile) -> int:
    return triton.cdiv(pooled.shape[0] * pooled.shape[2] * pooled.shape[3], tile.pixels.value)


def _norm_sums(upstream: Upstream, statistics: Tensor, scale: Tensor, layer: Layer) -> Tensor:
    """Gradients [n, 2, O] of shift and scale; fills upstream.coefficients."""
    num_nets, outputs = scale.shape
    tile = tile_of(layer, layer.num_pixels, upstream.gradient.base.dtype)
    tiles = _pooled_tiles(upstream.gradient.base, tile)
    partials = scale.new_empty(num_nets, tiles, 2, outputs, dtype=torch.float32)
    block.norm_sums_kernel[tiles, num_nets](upstream, rows(statistics), partials, layer, tile)
    sums = partials.sum(1)
    flat = rows(sums.flatten(0, 1))
    block.coefficients_kernel[num_nets,](flat, rows(statistics), rows(scale), upstream.coefficients, layer, tile)
    return sums
