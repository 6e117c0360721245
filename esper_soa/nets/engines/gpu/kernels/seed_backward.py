"""A slot's backward pass for all networks in one launch, in the manner of seed_forward.py.

The gradient of the features behind the slot becomes that of those before it, in place. On the way
every part's gradient map gets the gradient of its convolution's output, and its vectors those of
its norm or squeeze; seed_weights.py makes gradients of parameters from them.
"""

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels import seed, seed_forward
from esper_soa.nets.engines.gpu.kernels.seed import gradient_at, map_at
from esper_soa.nets.engines.gpu.kernels.squeeze import gate_net, part_net, squeeze_backward
from esper_soa.nets.engines.gpu.kernels.tiles import load_map, store_map


@triton.jit
def gate_backward(work, given, alpha, gradient, shape):
    """Gradient [lanes] of the mean pixel of x through the gate; `gradient`: behind the blend."""
    channel = tl.arange(0, shape.lanes)
    slope = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        x = load_map(map_at(work, 0, shape), span, channel, shape.stride)
        upstream = load_map(gradient, span, channel, shape.channels)
        slope += upstream * seed_forward.seed_residual(given, span, x, shape)
    total = tl.sum(tl.sum(slope, axis=1), axis=0)
    vectors = seed.vectors_at(work, shape.parts + 1, shape)
    outputs = seed.saved_vector(vectors, seed.GAIN, shape)
    behind = tl.where(channel == 0, alpha * total, 0.0)
    return squeeze_backward(gate_net(work[0], shape), vectors, behind, outputs, shape)


@triton.jit
def blend_backward(work, head, flags, alpha, gradient, shape):
    """Gradient of the seed's residual to the last part's map; `gradient` keeps the rest, that of x.

    Derivatives of nets/seeds/seeds.py. The residual falls as x rises where the seed replaces x,
    unless that x is cut off.
    """
    channel = tl.arange(0, shape.lanes)
    factor = alpha
    level = tl.zeros((shape.lanes,), tl.float32)
    given = seed_forward.seed_output(work, head, shape)
    cut = (flags & seed.DETACHED) != 0
    replacing = given[2]
    if flags & seed.GATED:
        gate = seed.vectors_at(work, shape.parts + 1, shape)
        factor = alpha * tl.sum(seed.saved_vector(gate, seed.GAIN, shape), axis=0)
        mean = gate_backward(work, given, alpha, gradient, shape)
        level = tl.where(cut, 0.0, mean / (shape.height * shape.width))
        tl.debug_barrier()
    target = gradient_at(work, tl.load(head + seed.COUNT) - 1, shape)
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        upstream = load_map(gradient, span, channel, shape.channels)
        inner = upstream
        outer = upstream
        if flags & seed.THROUGH:
            outer = tl.where(cut | replacing, upstream, 2.0 * upstream)
        elif flags & seed.MULTIPLIED:
            x = load_map(map_at(work, 0, shape), span, channel, shape.stride)
            slope = seed.tanh(seed_forward.seed_residual(given, span, x, shape))
            inner = alpha * x * (1.0 - slope * slope) * upstream
            outer = (1.0 + alpha * slope) * upstream
            outer = tl.where(replacing & (cut == 0), outer - inner, outer)
        else:
            inner = factor * upstream
            outer = tl.where(cut | replacing, upstream - inner, upstream) + level[None, :]
        store_map(target, span, inner, shape.stride)
        store_map(gradient, span, outer, shape.channels)


@triton.jit
def cut_gradient(given, gradient, span, shape):
    """(gradient behind the ReLU of a `part_output`, its map's numbers), float32 [M, lanes]."""
    channel = tl.arange(0, shape.lanes)
    affine = given[1]
    raw = load_map(given[0], span, channel, shape.stride)
    behind = load_map(gradient, span, channel, shape.stride)
    values = (raw - affine[0][None, :]) * affine[1][None, :] + affine[2][None, :]
    return tl.where((values <= 0) & affine[3], 0.0, behind), raw


@triton.jit
def norm_sums(work, part, number, shape):
    """Sums [lanes] over the pixels: of a part's gradient, and of it times the normalised."""
    given = seed.part_output(work, part, number, shape)
    gradient = gradient_at(work, number, shape)
    centre = given[1][0]
    total = tl.zeros((shape.tile, shape.lanes), tl.float32)
    product = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        behind, raw = cut_gradient(given, gradient, span, shape)
        total += behind
        product += behind * tl.where(span[1][:, None], raw - centre[None, :], 0.0)
    inverse = seed.saved_vector(seed.vectors_at(work, number + 1, shape), seed.INVERSE, shape)
    return tl.sum(total, axis=0), tl.sum(product, axis=0) * inverse


@triton.jit
def norm_backward(work, part, number, norm, sums, factor, shape):
    """Gradient map <- (1 - factor) * gradient + factor * that through the norm (first column)."""
    total, product = sums
    vectors = seed.vectors_at(work, number + 1, shape)
    outputs = tl.load(part + seed.OUTPUTS)
    given = seed.part_output(work, part, number, shape)
    target = gradient_at(work, number, shape)
    centre = given[1][0]
    inverse = seed.saved_vector(vectors, seed.INVERSE, shape)
    seed.save_vector(vectors, seed.TOTAL, factor * total, shape)
    seed.save_vector(vectors, seed.PRODUCT, factor * product, shape)
    scale = seed.parameters_at(work[0], norm, outputs, shape.lanes)
    per_group = outputs // tl.load(part + seed.GROUPS)
    count = per_group * (shape.height * shape.width)
    level = seed.group_sum(scale * total, per_group, outputs, shape) / count
    slope = seed.group_sum(scale * product, per_group, outputs, shape) / count
    through = factor * inverse
    kept = 1.0 - factor + through * scale
    level *= through
    slope *= through * inverse
    tl.debug_barrier()
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        gradient, raw = cut_gradient(given, target, span, shape)
        values = kept[None, :] * gradient - (raw - centre[None, :]) * slope[None, :]
        store_map(target, span, values - level[None, :], shape.stride)


@triton.jit
def conv_backward(work, part, number, shape):
    """The gradient map of a convolution: from behind its norm and ReLU to before them."""
    unit = tl.full((shape.lanes,), 1.0, tl.float32)
    if tl.load(part + seed.FLAGS) & seed.NORMED:
        size = seed.kernel_size(part, tl.load(part + seed.OUTPUTS))
        norm = tl.load(part + seed.OFFSET) + size
        sums = norm_sums(work, part, number, shape)
        norm_backward(work, part, number, norm, sums, unit, shape)
    else:
        given = seed.part_output(work, part, number, shape)
        target = gradient_at(work, number, shape)
        for first in range(0, seed.area_of(work, shape), shape.tile):
            span = seed.pixels_from(first, shape)
            gradient, _ = cut_gradient(given, target, span, shape)
            store_map(target, span, gradient, shape.stride)


@triton.jit
def soft_norm_backward(work, part, number, shape):
    """The gradient map of x + t (norm(x) - x): from behind it to before it; t = tanh(strength)."""
    at = tl.load(part + seed.OFFSET)
    outputs = tl.load(part + seed.OUTPUTS)
    vectors = seed.vectors_at(work, number + 1, shape)
    strength = seed.tanh(tl.load(work[0] + at + tl.arange(0, shape.lanes) * 0))
    total, product = norm_sums(work, part, number, shape)
    scale = seed.parameters_at(work[0], at + 1, outputs, shape.lanes)
    shift = seed.parameters_at(work[0], at + 1 + outputs, outputs, shape.lanes)
    centre = seed.saved_vector(vectors, seed.CENTRE, shape)
    inverse = seed.saved_vector(vectors, seed.INVERSE, shape)
    moved = scale * product + shift * total - product / inverse - centre * total
    known = tl.arange(0, shape.lanes) < outputs
    total_moved = tl.sum(tl.where(known, moved, 0.0), axis=0)
    seed.save_vector(vectors, seed.STRENGTH, total_moved * (1.0 - strength * strength), shape)
    sums = total, product
    norm_backward(work, part, number, at + 1, sums, strength, shape)


@triton.jit
def excite_backward(work, part, number, shape):
    """The gradient map of x times a squeeze of x: from behind it to before it."""
    channel = tl.arange(0, shape.lanes)
    source = map_at(work, tl.load(part + seed.MAP), shape)
    vectors = seed.vectors_at(work, number + 1, shape)
    target = gradient_at(work, number, shape)
    outputs = seed.saved_vector(vectors, seed.GAIN, shape)
    product = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        gradient = load_map(target, span, channel, shape.stride)
        product += gradient * load_map(source, span, channel, shape.stride)
    total = tl.sum(product, axis=0)
    mean = squeeze_backward(part_net(work[0], part), vectors, total, outputs, shape)
    mean = mean / (shape.height * shape.width)
    tl.debug_barrier()
    for first in range(0, seed.area_of(work, shape), shape.tile):
        span = seed.pixels_from(first, shape)
        gradient = load_map(target, span, channel, shape.stride)
        store_map(target, span, gradient * outputs[None, :] + mean[None, :], shape.stride)


@triton.jit
def pass_gradient(work, part, number, flags, gradient, shape):
    """From a part's gradient map to that of the part before, or to x of a seed not cut off."""
    kind = tl.load(part + seed.KIND)
    channel = tl.arange(0, shape.lanes)
    if (number > 0) | ((flags & seed.DETACHED) == 0):
        for first in range(0, seed.area_of(work, shape), shape.tile):
            span = seed.pixels_from(first, shape)
            result = tl.zeros((shape.tile, shape.lanes), tl.float32)
            if kind == seed.CONV:
                result = seed_forward.conv_tile(work, part, number, span[0], True, shape)
            elif kind == seed.DEPTH:
                result = seed_forward.depth_tile(work, part, number, span[0], True, shape)
            else:
                result = load_map(gradient_at(work, number, shape), span, channel, shape.stride)
            if number > 0:
                store_map(gradient_at(work, number - 1, shape), span, result, shape.stride)
            else:
                result += load_map(gradient, span, channel, shape.channels)
                store_map(gradient, span, result, shape.channels)


@triton.jit
def unpool_image(gradient, pooled, codes, place, shape):
    """gradient [H*W, C] of one image: that of the pool at the maximum of a window, else 0."""
    height: tl.constexpr = shape.height // 2
    width: tl.constexpr = shape.width // 2
    channel = tl.arange(0, shape.lanes)
    start = place * (height * width * shape.channels)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        row = span[0] // shape.width
        column = span[0] % shape.width
        known = span[1][:, None] & (channel < shape.channels)[None, :]
        in_map = known & ((row < 2 * height) & (column < 2 * width))[:, None]
        small = (row // 2 * width + column // 2)[:, None]
        source = start + small * shape.channels + channel[None, :]
        code = tl.load(codes + source, mask=in_map, other=4).to(tl.int32)
        is_maximum = in_map & (code == (row % 2 * 2 + column % 2)[:, None])
        values = tl.load(pooled + source, mask=is_maximum, other=0.0)
        store_map(gradient, span, values, shape.channels)


@triton.jit
def slot_backward_kernel(slot, gradient, pooled, codes):
    """gradient [N, B, H*W, C] of the features behind a slot, to that before it, in place.

    Grid (N, B). Where a pool follows it is made from that of the pooled features.
    """
    env = tl.program_id(0).to(tl.int64)
    place = env * tl.num_programs(1) + tl.program_id(1)
    pointer = gradient + place * (slot.shape.height * slot.shape.width * slot.shape.channels)
    if slot.shape.pool == 2:
        unpool_image(pointer, pooled, codes, place, slot.shape)
        tl.debug_barrier()
    flags, head = seed.member(slot, env)
    if flags & seed.RUNNING:
        work = seed.work_place(slot, env, place)
        blend_backward(work, head, flags, seed.alpha_of(slot, env), pointer, slot.shape)
        tl.debug_barrier()
        count = tl.load(head + seed.COUNT)
        for step in tl.range(0, count, disable_licm=True):
            number = count - 1 - step
            part = head + (1 + number) * seed.FIELDS
            kind = tl.load(part + seed.KIND)
            if kind == seed.CONV:
                conv_backward(work, part, number, slot.shape)
            if kind == seed.SOFT_NORM:
                soft_norm_backward(work, part, number, slot.shape)
            if kind == seed.EXCITE:
                excite_backward(work, part, number, slot.shape)
            tl.debug_barrier()
            pass_gradient(work, part, number, flags, pointer, slot.shape)
            tl.debug_barrier()
