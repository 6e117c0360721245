"""The host's block on a GPU, forward and backward: convolution, batch norm, ReLU and max pool.

The convolution leaves the batch statistics of its tiles behind, so activations are read once more
only, to be normalised and pooled together; in the backward pass the gradient through pool, ReLU and
batch norm is formed while it is loaded, never written. Sums run in two stages over a split that
depends on the batch alone: no atomics; no network depends on others, and grids have it first.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu.kernels.tiles import (
    NORM_EPS,
    Plane,
    add_product,
    at,
    conv_tile,
    has_ended,
    load_pixels,
    load_row,
    span_of,
    start_of,
    store_pixels,
    store_rows,
    tap_places,
    taps,
    transposed_kernel_tile,
)

NO_GRADIENT = tl.constexpr(4)  # code of a pooled pixel that ReLU has cut off


class Upstream(NamedTuple):
    """What the gradient of a convolution's output is made of."""

    gradient: Plane  # of the block's (pooled) output
    output: Plane  # of the convolution
    codes: Plane  # uint8: place of the maximum in its window, or NO_GRADIENT
    # Float32 [n, 4, O]: of the gradient, of the output, constant, batch mean.
    coefficients: Tensor


@triton.jit
def conv_kernel(x, weight, output, partials, layer, tile):
    """output = convolution; partials [n, tiles, 2, O] = mean, square sum. Grid (n, tiles)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    part = tl.program_id(1)
    span = span_of(part, layer.num_pixels, tile)
    values = conv_tile(x, env, weight, env, span, layer, tile)
    store_pixels(output, env, span, layer.outputs, values, tile.outputs)
    count = tl.sum(span[1].to(tl.float32), axis=0)
    mean = tl.sum(tl.where(span[1][:, None], values, 0.0), axis=0) / count
    centred = tl.where(span[1][:, None], values - mean[None, :], 0.0)
    place = partials + (env * tl.num_programs(1) + part) * 2 * layer.outputs
    store_rows(place, (mean, tl.sum(centred * centred, axis=0)), layer, tile)


@triton.jit
def statistics_kernel(partials, statistics, running, num_tiles, layer, tile):
    """statistics [n, 2, O] = mean and 1/deviation; moves running [mean, variance]. Grid (n,)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    start = partials + env * num_tiles * 2 * layer.outputs
    mean = tl.zeros((tile.outputs,), tl.float32)
    for first in range(0, num_tiles, tile.pixels):
        means, count = tile_moments(start, first, num_tiles, layer, tile)
        mean += tl.sum(means * count[:, None], axis=0) / layer.num_pixels
    squares = tl.zeros((tile.outputs,), tl.float32)
    for first in range(0, num_tiles, tile.pixels):
        means, count = tile_moments(start, first, num_tiles, layer, tile)
        centred, _ = tile_moments(start + layer.outputs, first, num_tiles, layer, tile)
        deviation = means - mean[None, :]
        squares += tl.sum(centred + deviation * deviation * count[:, None], axis=0)
    variance = squares / layer.num_pixels
    inverse = 1.0 / tl.sqrt(variance + NORM_EPS)
    store_rows(statistics + env * 2 * layer.outputs, (mean, inverse), layer, tile)
    move(running[0], env, mean, layer, tile)
    move(running[1], env, squares / (layer.num_pixels - 1), layer, tile)


@triton.jit
def tile_moments(start, first, num_tiles, layer, tile):
    """(numbers [T, O] of tiles from `first` on, then zeros; pixels per tile float32 [T])."""
    number = first + tl.arange(0, tile.pixels)
    channel = tl.arange(0, tile.outputs)
    mask = (number < num_tiles)[:, None] & (channel < layer.outputs)[None, :]
    values = tl.load(
        start + number[:, None] * 2 * layer.outputs + channel[None, :], mask=mask, other=0.0
    )
    rest = layer.num_pixels - number * tile.pixels
    return values, tl.maximum(tl.minimum(rest, tile.pixels), 0).to(tl.float32)


@triton.jit
def move(target, env, value, layer, tile):
    """target <- target + 0.1 (value - target)."""
    before = load_row(target, env, layer.outputs, tile.outputs)
    store_rows(start_of(target, env), (before + 0.1 * (value - before),), layer, tile)


@triton.jit
def window_pixel(pooled, down, right, layer):
    """Pixel of the full map in row `down` and column `right` of the window of a pooled pixel."""
    height: tl.constexpr = layer.height // layer.pool
    width: tl.constexpr = layer.width // layer.pool
    row = pooled // width % height * layer.pool + down
    column = pooled % width * layer.pool + right
    return (pooled // (height * width) * layer.height + row) * layer.width + column


@triton.jit
def num_pooled(layer):
    """Pixels of the pooled map, over the batch."""
    area: tl.constexpr = (layer.height // layer.pool) * (layer.width // layer.pool)
    return layer.num_pixels // (layer.height * layer.width) * area


@triton.jit
def norm_pool_kernel(output, statistics, affine, pooled, codes, layer, tile):
    """pooled = max pool of ReLU of batch norm, NaN too; codes for its way back. Grid (n, tiles)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    span = span_of(tl.program_id(1), num_pooled(layer), tile)
    mean = load_row(statistics, 2 * env, layer.outputs, tile.outputs)
    scale = load_row(statistics, 2 * env + 1, layer.outputs, tile.outputs)
    scale *= load_row(affine[0], env, layer.outputs, tile.outputs)
    shift = load_row(affine[1], env, layer.outputs, tile.outputs)
    best = tl.full((tile.pixels, tile.outputs), float("-inf"), tl.float32)
    code = tl.zeros((tile.pixels, tile.outputs), tl.int32)
    for down in tl.static_range(layer.pool):
        for right in tl.static_range(layer.pool):
            window = window_pixel(span[0], down, right, layer), span[1]
            values = load_pixels(output, env, window, layer.outputs, tile.outputs).to(tl.float32)
            values = (values - mean[None, :]) * scale[None, :] + shift[None, :]
            better = (values > best) | (values != values)
            code = tl.where(better, layer.pool * down + right, code)
            best = tl.where(better, values, best)
    code = tl.where(best <= 0, NO_GRADIENT, code)
    best = tl.where(best < 0, 0.0, best)
    store_pixels(pooled, env, span, layer.outputs, best, tile.outputs)
    store_pixels(codes, env, span, layer.outputs, code, tile.outputs)


@triton.jit
def norm_sums_kernel(upstream, statistics, partials, layer, tile):
    """partials [n, tiles, 2, O]: sums of the gradient after batch norm, and times the normalised.

    Only the maxima count: the output is read where `codes` points. Grid (n, tiles).
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    part = tl.program_id(1)
    span = span_of(part, num_pooled(layer), tile)
    channel = tl.arange(0, tile.outputs)
    code = load_pixels(upstream.codes, env, span, layer.outputs, tile.outputs).to(tl.int32)
    has_gradient = span[1][:, None] & (code != NO_GRADIENT) & (channel < layer.outputs)[None, :]
    gradient = load_pixels(upstream.gradient, env, span, layer.outputs, tile.outputs)
    gradient = tl.where(has_gradient, gradient.to(tl.float32), 0.0)
    source = window_pixel(span[0][:, None], code // layer.pool, code % layer.pool, layer)
    values = at(upstream.output, env, source, channel, has_gradient).to(tl.float32)
    mean = load_row(statistics, 2 * env, layer.outputs, tile.outputs)
    scale = load_row(statistics, 2 * env + 1, layer.outputs, tile.outputs)
    products = tl.where(has_gradient, gradient * (values - mean[None, :]) * scale[None, :], 0.0)
    place = partials + (env * tl.num_programs(1) + part) * 2 * layer.outputs
    store_rows(place, (tl.sum(gradient, axis=0), tl.sum(products, axis=0)), layer, tile)


@triton.jit
def coefficients_kernel(sums, statistics, scale, coefficients, affine, layer, tile):
    """coefficients [n, 4, O] of `Upstream` (Ioffe and Szegedy 2015). Grid (n,).

    sums: partials [n, tiles, 2, O] and the number of tiles; affine: rows that get gradients [2, O]
    of scale and shift.
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    total = tl.zeros((tile.outputs,), tl.float32)
    product = tl.zeros((tile.outputs,), tl.float32)
    start = sums[0] + env * sums[1] * 2 * layer.outputs
    for first in range(0, sums[1], tile.pixels):
        totals, _ = tile_moments(start, first, sums[1], layer, tile)
        products, _ = tile_moments(start + layer.outputs, first, sums[1], layer, tile)
        total += tl.sum(totals, axis=0)
        product += tl.sum(products, axis=0)
    store_rows(start_of(affine, env), (product, total), layer, tile)
    total = total / layer.num_pixels
    product = product / layer.num_pixels
    mean = load_row(statistics, 2 * env, layer.outputs, tile.outputs)
    inverse = load_row(statistics, 2 * env + 1, layer.outputs, tile.outputs)
    gain = load_row(scale, env, layer.outputs, tile.outputs) * inverse
    values = gain, -gain * inverse * product, -gain * total, mean
    store_rows(coefficients + env * 4 * layer.outputs, values, layer, tile)


@triton.jit
def gradient_taps(upstream, env, span, columns, size: tl.constexpr, layer):
    """Tile [M, K] of the gradient of a convolution's output; columns [K] = (tap, channel)."""
    place, inside, channel = tap_places(span, columns, layer.outputs, size, layer)
    row = place // layer.width % layer.height
    column = place % layer.width
    height: tl.constexpr = layer.height // layer.pool
    width: tl.constexpr = layer.width // layer.pool
    pooled = place // (layer.height * layer.width) * height + row // layer.pool
    pooled = pooled * width + column // layer.pool
    in_map = inside & (row < height * layer.pool) & (column < width * layer.pool)
    code = at(upstream.codes, env, pooled, channel, in_map).to(tl.int32)
    is_maximum = in_map & (code == row % layer.pool * layer.pool + column % layer.pool)
    gradient = at(upstream.gradient, env, pooled, channel, is_maximum).to(tl.float32)
    output = at(upstream.output, env, place, channel, inside).to(tl.float32)
    start = upstream.coefficients + env * 4 * layer.outputs + channel
    known = columns < layer.outputs * size * size
    gain = tl.load(start, mask=known, other=0.0)[None, :]
    slope = tl.load(start + layer.outputs, mask=known, other=0.0)[None, :]
    constant = tl.load(start + 2 * layer.outputs, mask=known, other=0.0)[None, :]
    mean = tl.load(start + 3 * layer.outputs, mask=known, other=0.0)[None, :]
    return tl.where(inside, gain * gradient + slope * (output - mean) + constant, 0.0)


@triton.jit
def input_gradient_kernel(upstream, weight, target, layer, tile):
    """target = transposed convolution. Grid (n, tiles)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    span = span_of(tl.program_id(1), layer.num_pixels, tile)
    result = tl.zeros((tile.pixels, tile.inputs), tl.float32)
    for first in range(0, layer.outputs * layer.size * layer.size, tile.columns):
        columns = first + tl.arange(0, tile.columns)
        values = gradient_taps(upstream, env, span, columns, layer.size, layer)
        values = values.to(target.base.dtype.element_ty)
        weights = transposed_kernel_tile(weight, env, columns, layer, tile).to(values.dtype)
        result = add_product(values, weights, result, tile)
    store_pixels(target, env, span, layer.inputs, result, tile.inputs)


@triton.jit
def weight_gradient_kernel(upstream, x, partials, width, layer, tile):
    """partials: rows [n, splits] `width` apart that get [O, I, k, k] of a part of the pixels.

    Grid (n, splits, tiles); the tiles are those of the columns (tap, stored input channel).
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    split = tl.program_id(1)
    columns = tl.program_id(2) * tile.group + tl.arange(0, tile.group)
    output = tl.arange(0, tile.outputs)
    result = tl.zeros((tile.group, tile.outputs), tl.float32)
    share = tl.cdiv(tl.cdiv(layer.num_pixels, tl.num_programs(1)), tile.pixels) * tile.pixels
    last = tl.minimum((split + 1) * share, layer.num_pixels)
    for first in range(split * share, last, tile.pixels):
        pixels = first + tl.arange(0, tile.pixels)
        span = pixels, pixels < layer.num_pixels
        values = taps(x, env, span, columns, layer.stored, layer.size, layer)
        gradient = gradient_taps(upstream, env, span, output, 1, layer).to(values.dtype)
        result = add_product(tl.trans(values), gradient, result, tile)
    num_taps: tl.constexpr = layer.size * layer.size
    tap = columns // layer.stored
    channel = columns % layer.stored
    start = partials + (env * tl.num_programs(1) + split) * width
    place = output[None, :] * (layer.inputs * num_taps) + (channel * num_taps + tap)[:, None]
    known = (channel < layer.inputs) & (columns < layer.stored * num_taps)
    tl.store(start + place, result, mask=(output < layer.outputs)[None, :] & known[:, None])


@triton.jit
def evaluation_kernel(x, pooled, weight, norm, branches, layer, tile):
    """pooled = max pool of ReLU of batch norm of convolution, with running statistics.

    Grid (n * rows, tiles). x, pooled: a plane per network and row; norm: scale, shift, mean and
    variance; branches: (rows, int32 [n] of how many of them a network has).
    """
    unit = tl.program_id(0).to(tl.int64)
    env = unit // branches[0]
    if unit % branches[0] < tl.load(branches[1] + env):
        span = span_of(tl.program_id(1), num_pooled(layer), tile)
        gain = load_row(norm[0], env, layer.outputs, tile.outputs)
        gain /= tl.sqrt(load_row(norm[3], env, layer.outputs, tile.outputs) + NORM_EPS)
        mean = load_row(norm[2], env, layer.outputs, tile.outputs)
        shift = load_row(norm[1], env, layer.outputs, tile.outputs)
        best = tl.full((tile.pixels, tile.outputs), float("-inf"), tl.float32)
        for down in tl.static_range(layer.pool):
            for right in tl.static_range(layer.pool):
                window = window_pixel(span[0], down, right, layer), span[1]
                values = conv_tile(x, unit, weight, env, window, layer, tile)
                values = (values - mean[None, :]) * gain[None, :] + shift[None, :]
                best = tl.where((values > best) | (values != values), values, best)
        best = tl.where(best < 0, 0.0, best)
        store_pixels(pooled, unit, span, layer.outputs, best, tile.outputs)
