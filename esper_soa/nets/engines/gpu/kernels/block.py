"""The host's block on a GPU, forward and backward: convolution, batch norm, ReLU and max pool.

The convolution leaves the batch statistics of its tiles behind, so activations are read once more
only, to be normalised and pooled together; in the backward pass the gradient through pool, ReLU and
batch norm is formed while it is loaded, never written. Sums run in two stages over a split that
depends on the batch alone: no atomics; no network depends on others, and grids have it first.
"""

from typing import NamedTuple

import triton
import triton.language as tl

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
    taps,
    weight_places,
)

MAX_SPLITS = tl.constexpr(32)  # parts of a sum over the pixels of a batch
NO_GRADIENT = tl.constexpr(4)  # code of a pooled pixel that ReLU has cut off


class Upstream(NamedTuple):
    """The sources of the gradient of a convolution's output."""

    gradient: Plane  # of the block's (pooled) output
    output: Plane  # of the convolution
    codes: Plane  # uint8: place of the maximum in its window, or NO_GRADIENT


@triton.jit
def conv_kernel(x, weight, output, partials, layer, tile):
    """output = convolution; partials [n, tiles, 2, O] = mean, square sum. Grid (n, tiles)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    part = tl.program_id(1)
    span = span_of(part * tile.pixels, layer.num_pixels, tile)
    values = conv_tile(x, env, start_of(weight, env), span, layer, tile, False)
    store_pixels(output, env, span, layer.outputs, values, tile.outputs)
    count = tl.minimum(layer.num_pixels - part * tile.pixels, tile.pixels).to(tl.float32)
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
    span = span_of(tl.program_id(1) * tile.pixels, num_pooled(layer), tile)
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
def norm_sums_kernel(upstream, statistics, sums, share, layer, tile):
    """sums [n, splits, 2, O]: of the gradient after batch norm, and times the normalised.

    Only the maxima count: the output is read where `codes` points. share: pixels of a split. Grid
    (n, splits).
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    channel = tl.arange(0, tile.outputs)
    mean = load_row(statistics, 2 * env, layer.outputs, tile.outputs)
    total = tl.zeros((tile.pixels, tile.outputs), tl.float32)
    product = tl.zeros((tile.pixels, tile.outputs), tl.float32)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, num_pooled(layer)), tile.pixels):
        span = span_of(start, num_pooled(layer), tile)
        code = load_pixels(upstream.codes, env, span, layer.outputs, tile.outputs).to(tl.int32)
        has_gradient = span[1][:, None] & (code != NO_GRADIENT) & (channel < layer.outputs)[None, :]
        gradient = load_pixels(upstream.gradient, env, span, layer.outputs, tile.outputs)
        gradient = tl.where(has_gradient, gradient.to(tl.float32), 0.0)
        if layer.pool == 1:
            values = load_pixels(upstream.output, env, span, layer.outputs, tile.outputs)
        else:
            row = code // layer.pool
            column = code % layer.pool
            source = window_pixel(span[0][:, None], row, column, layer)
            values = at(upstream.output, env, source, channel, has_gradient)
        centred = tl.where(has_gradient, values.to(tl.float32) - mean[None, :], 0.0)
        total += gradient
        product += gradient * centred
    inverse = load_row(statistics, 2 * env + 1, layer.outputs, tile.outputs)
    place = sums + (env * tl.num_programs(1) + tl.program_id(1)) * 2 * layer.outputs
    store_rows(place, (tl.sum(total, axis=0), tl.sum(product, axis=0) * inverse), layer, tile)


@triton.jit
def coefficients(sums, statistics, norm, layer, tile):
    """(gain, slope, constant) [O]: see output_gradient_kernel (Ioffe and Szegedy 2015).

    The first program writes the gradients of scale and shift.
    """
    env = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, MAX_SPLITS)
    channel = tl.arange(0, tile.outputs)
    place = sums[0] + (env * sums[1] + number)[:, None] * 2 * layer.outputs + channel[None, :]
    mask = (number < sums[1])[:, None] & (channel < layer.outputs)[None, :]
    total = tl.sum(tl.load(place, mask=mask, other=0.0), axis=0)
    product = tl.sum(tl.load(place + layer.outputs, mask=mask, other=0.0), axis=0)
    if tl.program_id(1) == 0:
        store_rows(start_of(norm[1], env), (product, total), layer, tile)
    inverse = load_row(statistics, 2 * env + 1, layer.outputs, tile.outputs)
    gain = load_row(norm[0], env, layer.outputs, tile.outputs) * inverse
    return gain, -gain * inverse * product / layer.num_pixels, -gain * total / layer.num_pixels


@triton.jit
def output_gradient_kernel(upstream, statistics, norm, sums, share, layer, tile):
    """Gradient of the convolution's output, in its place. Grid (n, splits).

    norm: Rows of its scale, and Rows that get gradients [2, O] of scale and shift; sums: of
    norm_sums_kernel, and their number of splits; share: pixels of a split here.
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    known = coefficients(sums, statistics, norm, layer, tile)
    mean = load_row(statistics, 2 * env, layer.outputs, tile.outputs)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, layer.num_pixels), tile.pixels):
        span = span_of(start, layer.num_pixels, tile)
        gradient = unpooled(upstream, env, span, layer, tile)
        values = load_pixels(upstream.output, env, span, layer.outputs, tile.outputs)
        centred = values.to(tl.float32) - mean[None, :]
        values = known[0][None, :] * gradient + known[1][None, :] * centred + known[2][None, :]
        store_pixels(upstream.output, env, span, layer.outputs, values, tile.outputs)


@triton.jit
def unpooled(upstream, env, span, layer, tile):
    """float32 [M, O]: the gradient of what pool and ReLU are given."""
    inside = span[1]
    pooled = span[0]
    code = tl.zeros_like(pooled)
    if layer.pool > 1:
        row = pooled // layer.width % layer.height
        column = pooled % layer.width
        height: tl.constexpr = layer.height // layer.pool
        width: tl.constexpr = layer.width // layer.pool
        code = row % layer.pool * layer.pool + column % layer.pool
        inside = inside & (row < height * layer.pool) & (column < width * layer.pool)
        pooled = pooled // (layer.height * layer.width) * height + row // layer.pool
        pooled = pooled * width + column // layer.pool
    places = pooled, inside
    maximum = load_pixels(upstream.codes, env, places, layer.outputs, tile.outputs)
    gradient = load_pixels(upstream.gradient, env, places, layer.outputs, tile.outputs)
    return tl.where(maximum.to(tl.int32) == code[:, None], gradient.to(tl.float32), 0.0)


@triton.jit
def input_gradient_kernel(gradient, weight, target, layer, tile):
    """target = transposed convolution of the gradient of the output. Grid (n, tiles)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    span = span_of(tl.program_id(1) * tile.pixels, layer.num_pixels, tile)
    values = conv_tile(gradient, env, start_of(weight, env), span, layer, tile, True)
    store_pixels(target, env, span, layer.inputs, values, tile.inputs)


@triton.jit
def weight_gradient_kernel(gradient, x, partials, width, share, layer, tile):
    """partials: Rows with [splits, `width`], whose first columns get [O, I, k, k] of some pixels.

    Grid (n, splits, tiles); the tiles are those of the columns (tap, stored input channel).
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(layer.words, env):
        return
    columns = tl.program_id(2) * tile.group + tl.arange(0, tile.group)
    result = tl.zeros((tile.group, tile.outputs), tl.float32)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, layer.num_pixels), tile.pixels):
        span = span_of(start, layer.num_pixels, tile)
        values = taps(x, env, span, columns, layer.stored, layer.size, layer)
        behind = load_pixels(gradient, env, span, layer.outputs, tile.outputs)
        result = add_product(tl.trans(values), behind, result, tile)
    place, known = weight_places(columns, layer, tile, False)
    start = start_of(partials, env) + tl.program_id(1) * width
    tl.store(start + place, result, mask=known)


@triton.jit
def evaluation_kernel(x, pooled, weight, norm, branches, layer, tile):
    """pooled = max pool of ReLU of batch norm of convolution, with running statistics.

    Grid (n * rows, tiles). x, pooled: a plane per network and row; norm: scale, shift, mean and
    variance; branches: (rows, int32 [n] of how many of them a network has).
    """
    unit = tl.program_id(0).to(tl.int64)
    env = unit // branches[0]
    if unit % branches[0] < tl.load(branches[1] + env):
        span = span_of(tl.program_id(1) * tile.pixels, num_pooled(layer), tile)
        gain = load_row(norm[0], env, layer.outputs, tile.outputs)
        gain /= tl.sqrt(load_row(norm[3], env, layer.outputs, tile.outputs) + NORM_EPS)
        mean = load_row(norm[2], env, layer.outputs, tile.outputs)
        shift = load_row(norm[1], env, layer.outputs, tile.outputs)
        best = tl.full((tile.pixels, tile.outputs), float("-inf"), tl.float32)
        for down in tl.static_range(layer.pool):
            for right in tl.static_range(layer.pool):
                window = window_pixel(span[0], down, right, layer), span[1]
                values = conv_tile(x, unit, start_of(weight, env), window, layer, tile, False)
                values = (values - mean[None, :]) * gain[None, :] + shift[None, :]
                best = tl.where((values > best) | (values != values), values, best)
        best = tl.where(best < 0, 0.0, best)
        store_pixels(pooled, unit, span, layer.outputs, best, tile.outputs)
