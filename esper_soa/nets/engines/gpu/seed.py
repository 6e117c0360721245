"""Convolutional seeds on a GPU in one pass: convolution, group norm, ReLU, residual and alpha blend.

One program does one sample of one network of a device-built list (-1 = nothing to do, it returns at once), in the
manner of vLLM's fused_moe: the grid is as large as the list can be, so nothing about it is ever read by the host. The
convolution is computed once for the group norm's statistics and again for the result; nothing of it is written.
Called by seed_autograd.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu.tiles import (
    NORM_EPS,
    Plane,
    Rows,
    conv_tile,
    load_pixels,
    load_row,
    store_pixels,
)


class Seeds(NamedTuple):
    """What the seeds of N networks in one slot see, and their rows; only what `live` lists is read."""

    x: Plane
    live: Tensor  # int32 [capacity], network numbers, -1 = none
    weight: Rows  # [C, C, k, k]
    scale: Rows  # [C]
    shift: Rows  # [C]
    factor: Tensor  # float32 [N], weight of the seed's output: alpha, or 1 for the straight-through pass
    groups: tl.constexpr  # of the group norm


class SeedGradients(NamedTuple):
    """What the backward pass reads and writes."""

    output: Plane  # gradient of the slot's output
    convolution: Plane  # written: gradient of the convolution's output
    affine: Tensor  # float32 [N, B, 2, C], written: gradients of shift and scale by sample


@triton.jit
def normalisation(seeds, env, first_pixel, layer, tile):
    """Group norm of the convolution for one sample: float32 [C] each of mean and 1/deviation, by channel.

    Chan's rule joins the moments of tiles, and those of the channels of a group.
    """
    area: tl.constexpr = layer.height * layer.width
    mean = tl.zeros((tile.outputs,), tl.float32)
    squares = tl.zeros((tile.outputs,), tl.float32)
    seen = 0.0
    for first in range(0, area, tile.pixels):
        place = first + tl.arange(0, tile.pixels)
        valid = place < area
        values = conv_tile(seeds.x, seeds.weight, env, (first_pixel + place, valid), layer, tile)
        count = tl.sum(valid.to(tl.float32), axis=0)
        here = tl.sum(tl.where(valid[:, None], values, 0.0), axis=0) / count
        apart = tl.where(valid[:, None], values - here[None, :], 0.0)
        delta = here - mean
        squares += tl.sum(apart * apart, axis=0) + delta * delta * (seen * count / (seen + count))
        mean += delta * (count / (seen + count))
        seen += count
    channels: tl.constexpr = layer.outputs // seeds.groups
    joined = group_sum(mean, seeds, layer, tile) / channels
    squares = group_sum(squares + (mean - joined) * (mean - joined) * area, seeds, layer, tile)
    return joined, 1.0 / tl.sqrt(squares / (channels * area) + NORM_EPS)


@triton.jit
def group_sum(values, seeds, layer, tile):
    """For every channel the sum of values [C] over the channels of its group."""
    channels: tl.constexpr = layer.outputs // seeds.groups
    channel = tl.arange(0, tile.outputs)
    same = channel[:, None] // channels == channel[None, :] // channels
    same = same & (channel < layer.outputs)[None, :]
    return tl.sum(tl.where(same, values[None, :], 0.0), axis=1)


@triton.jit
def seed_forward_kernel(target, seeds, layer, tile):
    """target = x + factor ReLU(group norm(convolution(x))), x = seeds.x, for listed networks. Grid (B, capacity)."""
    area: tl.constexpr = layer.height * layer.width
    env = tl.load(seeds.live + tl.program_id(1))
    if env < 0:
        return
    first_pixel = tl.program_id(0) * area
    mean, inverse = normalisation(seeds, env, first_pixel, layer, tile)
    gain = load_row(seeds.scale, env, layer.outputs, tile.outputs) * inverse
    shift = load_row(seeds.shift, env, layer.outputs, tile.outputs)
    factor = tl.load(seeds.factor + env)
    for first in range(0, area, tile.pixels):
        place = first + tl.arange(0, tile.pixels)
        span = (first_pixel + place, place < area)
        values = conv_tile(seeds.x, seeds.weight, env, span, layer, tile)
        values = (values - mean[None, :]) * gain[None, :] + shift[None, :]
        host = load_pixels(seeds.x, env, span, layer.outputs, tile.outputs).to(tl.float32)
        values = host + factor * tl.where(values < 0, 0.0, values)
        store_pixels(target, env, span, layer.outputs, values, tile.outputs)


@triton.jit
def normalised_and_gradient(seeds, gradients, env, span, moments, layer, tile):
    """(normalised convolution, gradient after the group norm's affine map), float32 [M, C] each."""
    values = conv_tile(seeds.x, seeds.weight, env, span, layer, tile)
    normalised = (values - moments[0][None, :]) * moments[1][None, :]
    scale = load_row(seeds.scale, env, layer.outputs, tile.outputs)
    shift = load_row(seeds.shift, env, layer.outputs, tile.outputs)
    gradient = load_pixels(gradients.output, env, span, layer.outputs, tile.outputs).to(tl.float32)
    gradient *= tl.load(seeds.factor + env)
    cut = (normalised * scale[None, :] + shift[None, :] <= 0) | ~span[1][:, None]
    return normalised, tl.where(cut, 0.0, gradient)


@triton.jit
def seed_backward_kernel(seeds, gradients, layer, tile):
    """Writes SeedGradients.convolution and .affine for listed networks; others stay. Grid (B, capacity)."""
    area: tl.constexpr = layer.height * layer.width
    env = tl.load(seeds.live + tl.program_id(1))
    if env < 0:
        return
    sample = tl.program_id(0)
    first_pixel = sample * area
    moments = normalisation(seeds, env, first_pixel, layer, tile)
    total = tl.zeros((tile.outputs,), tl.float32)
    product = tl.zeros((tile.outputs,), tl.float32)
    for first in range(0, area, tile.pixels):
        place = first + tl.arange(0, tile.pixels)
        span = (first_pixel + place, place < area)
        normalised, gradient = normalised_and_gradient(seeds, gradients, env, span, moments, layer, tile)
        total += tl.sum(gradient, axis=0)
        product += tl.sum(tl.where(span[1][:, None], gradient * normalised, 0.0), axis=0)
    channel = tl.arange(0, tile.outputs)
    start = gradients.affine + (env.to(tl.int64) * tl.num_programs(0) + sample) * 2 * layer.outputs + channel
    tl.store(start, total, mask=channel < layer.outputs)
    tl.store(start + layer.outputs, product, mask=channel < layer.outputs)
    count: tl.constexpr = layer.outputs // seeds.groups * area
    scale = load_row(seeds.scale, env, layer.outputs, tile.outputs)
    total = group_sum(scale * total, seeds, layer, tile) / count
    product = group_sum(scale * product, seeds, layer, tile) / count
    for first in range(0, area, tile.pixels):
        place = first + tl.arange(0, tile.pixels)
        span = (first_pixel + place, place < area)
        normalised, gradient = normalised_and_gradient(seeds, gradients, env, span, moments, layer, tile)
        values = gradient * scale[None, :] - total[None, :] - normalised * product[None, :]
        store_pixels(gradients.convolution, env, span, layer.outputs, values * moments[1][None, :], tile.outputs)
