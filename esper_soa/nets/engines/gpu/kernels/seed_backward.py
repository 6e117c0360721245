"""A slot's backward pass for all networks in one launch, in the manner of seed_forward.py.

The gradient of the features behind the slot becomes that of those before it, in place. On the way
every part's gradient map gets the gradient of its convolution's output, and its vectors those of
its norm or squeeze; seed_weights.py makes gradients of parameters from them. Launched by slots.py.
"""

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels.pool import unpool_image
from esper_soa.nets.engines.gpu.kernels.seed import (
    CENTRE,
    CONV,
    COUNT,
    DEPTH,
    DETACHED,
    EXCITE,
    FIELDS,
    FLAGS,
    GAIN,
    GATED,
    GROUPS,
    INPUTS,
    INVERSE,
    KERNEL,
    KIND,
    MAP,
    MULTIPLIED,
    NORMED,
    OFFSET,
    OUTPUTS,
    PRODUCT,
    RELU,
    REPLACING,
    RUNNING,
    SHIFT,
    SOFT_NORM,
    STRENGTH,
    THROUGH,
    TOTAL,
    add_product,
    gradient_at,
    group_sum,
    load_map,
    map_at,
    member,
    parameters_at,
    pixels_from,
    save_vector,
    saved_vector,
    shifted,
    store_map,
    tanh,
    vectors_at,
    work_place,
)
from esper_soa.nets.engines.gpu.kernels.seed_forward import (
    load_features,
    seed_less_input,
    store_features,
)
from esper_soa.nets.engines.gpu.kernels.squeeze import gate_net, part_net, squeeze_back


@triton.jit
def blend_back(work, head, flags, alpha, gradient, shape):
    """Gradient of the seed's residual to the last part's map; what reaches x beside the parts stays
    in `gradient`.

    Derivatives of nets/blend.py. The residual falls as x rises where the seed replaces x, unless
    that x is cut off.
    """
    channel = tl.arange(0, shape.lanes)
    factor = alpha
    slope = 0.0
    gate = vectors_at(work, shape.parts + 1, shape)
    replacing = tl.load(head + REPLACING) != 0
    cut = (flags & DETACHED) != 0
    target = gradient_at(work, tl.load(head + COUNT) - 1, shape)
    if flags & GATED:
        factor = alpha * tl.sum(saved_vector(gate, GAIN, shape), axis=0)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        upstream = load_features(gradient, pixels, inside, shape)
        inner = upstream
        outer = upstream
        if flags & THROUGH:
            outer = tl.where(cut | replacing, upstream, 2.0 * upstream)
        else:
            x = load_map(map_at(work, 0, shape), pixels, inside, channel, shape)
            change = seed_less_input(work, head, pixels, inside, x, shape)
            slope += tl.sum(tl.sum(upstream * change, axis=1), axis=0)
            if flags & MULTIPLIED:
                bent = tanh(change)
                inner = alpha * x * (1.0 - bent * bent) * upstream
                outer = (1.0 + alpha * bent) * upstream
                outer = tl.where(replacing & (cut == 0), outer - inner, outer)
            else:
                inner = factor * upstream
                outer = tl.where(cut | replacing, upstream - inner, upstream)
        store_map(target, pixels, inside, inner, shape)
        store_features(gradient, pixels, inside, outer, shape)
    if flags & GATED:
        passed = tl.where(channel == 0, alpha * slope, 0.0)
        mean = squeeze_back(
            gate_net(work[0], shape), gate, passed, saved_vector(gate, GAIN, shape), shape
        )
        if cut == 0:
            tl.debug_barrier()
            add_everywhere(gradient, mean / (shape.height * shape.width), shape)


@triton.jit
def add_everywhere(gradient, values, shape):
    """gradient [H*W, C] += values [lanes] at every pixel."""
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        moved = load_features(gradient, pixels, inside, shape) + values[None, :]
        store_features(gradient, pixels, inside, moved, shape)


@triton.jit
def cut_gradient(work, part, number, pixels, inside, shape):
    """(gradient behind a part's ReLU, its map's numbers), float32 [M, lanes]."""
    channel = tl.arange(0, shape.lanes)
    vectors = vectors_at(work, number + 1, shape)
    raw = load_map(map_at(work, tl.load(part + MAP), shape), pixels, inside, channel, shape)
    gradient = load_map(gradient_at(work, number, shape), pixels, inside, channel, shape)
    values = (raw - saved_vector(vectors, CENTRE, shape)[None, :]) * saved_vector(
        vectors, GAIN, shape
    )[None, :]
    values += saved_vector(vectors, SHIFT, shape)[None, :]
    relu = (tl.load(part + FLAGS) & RELU) != 0
    return tl.where((values <= 0) & relu, 0.0, gradient), raw


@triton.jit
def norm_sums(work, part, number, shape):
    """Sums [lanes] over the pixels: of a part's gradient, and of it times the normalised."""
    vectors = vectors_at(work, number + 1, shape)
    centre = saved_vector(vectors, CENTRE, shape)
    inverse = saved_vector(vectors, INVERSE, shape)
    total = tl.zeros((shape.lanes,), tl.float32)
    product = tl.zeros((shape.lanes,), tl.float32)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        gradient, raw = cut_gradient(work, part, number, pixels, inside, shape)
        normalised = tl.where(inside[:, None], (raw - centre[None, :]) * inverse[None, :], 0.0)
        total += tl.sum(gradient, axis=0)
        product += tl.sum(gradient * normalised, axis=0)
    return total, product


@triton.jit
def norm_back(work, part, number, norm, kept, factor, shape):
    """Gradient map <- kept * gradient + factor * that through the norm (its first column)."""
    vectors = vectors_at(work, number + 1, shape)
    outputs = tl.load(part + OUTPUTS)
    centre = saved_vector(vectors, CENTRE, shape)
    inverse = saved_vector(vectors, INVERSE, shape)
    total, product = norm_sums(work, part, number, shape)
    scale = parameters_at(work[0], norm, outputs, shape)
    per_group = outputs // tl.load(part + GROUPS)
    count = per_group * (shape.height * shape.width)
    level = group_sum(scale * total, per_group, outputs, shape) / count
    slope = group_sum(scale * product, per_group, outputs, shape) / count
    tl.debug_barrier()
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        gradient, raw = cut_gradient(work, part, number, pixels, inside, shape)
        normalised = (raw - centre[None, :]) * inverse[None, :]
        through = (
            scale[None, :] * gradient - level[None, :] - normalised * slope[None, :]
        ) * inverse[None, :]
        values = kept[None, :] * gradient + factor[None, :] * through
        store_map(gradient_at(work, number, shape), pixels, inside, values, shape)
    save_vector(vectors, TOTAL, factor * total, shape)
    save_vector(vectors, PRODUCT, factor * product, shape)
    return total, product


@triton.jit
def conv_back(work, part, number, shape):
    """The gradient map of a convolution: from behind its norm and ReLU to before them."""
    ones = tl.full((shape.lanes,), 1.0, tl.float32)
    if tl.load(part + FLAGS) & NORMED:
        kernel = tl.load(part + KERNEL)
        at = (
            tl.load(part + OFFSET)
            + tl.load(part + OUTPUTS) * tl.load(part + INPUTS) * kernel * kernel
        )
        norm_back(work, part, number, at, 0.0 * ones, ones, shape)
    else:
        for first in range(0, shape.height * shape.width, shape.tile):
            pixels, inside = pixels_from(first, shape)
            gradient, _ = cut_gradient(work, part, number, pixels, inside, shape)
            store_map(gradient_at(work, number, shape), pixels, inside, gradient, shape)


@triton.jit
def soft_norm_back(work, part, number, shape):
    """The gradient map of x + t (norm(x) - x): from behind it to before it; t = tanh(strength)."""
    at = tl.load(part + OFFSET)
    outputs = tl.load(part + OUTPUTS)
    vectors = vectors_at(work, number + 1, shape)
    strength = tanh(tl.load(work[0] + at + tl.arange(0, shape.lanes) * 0))
    total, product = norm_back(work, part, number, at + 1, 1.0 - strength, strength, shape)
    scale = parameters_at(work[0], at + 1, outputs, shape)
    shift = parameters_at(work[0], at + 1 + outputs, outputs, shape)
    centre = saved_vector(vectors, CENTRE, shape)
    inverse = saved_vector(vectors, INVERSE, shape)
    moved = scale * product + shift * total - product / inverse - centre * total
    known = tl.arange(0, shape.lanes) < outputs
    total_moved = tl.sum(tl.where(known, moved, 0.0), axis=0)
    save_vector(vectors, STRENGTH, total_moved * (1.0 - strength * strength), shape)


@triton.jit
def excite_back(work, part, number, shape):
    """The gradient map of x times a squeeze of x: from behind it to before it."""
    channel = tl.arange(0, shape.lanes)
    own = tl.load(part + MAP)
    vectors = vectors_at(work, number + 1, shape)
    target = gradient_at(work, number, shape)
    outputs = saved_vector(vectors, GAIN, shape)
    product = tl.zeros((shape.lanes,), tl.float32)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        gradient = load_map(target, pixels, inside, channel, shape)
        product += tl.sum(
            gradient * load_map(map_at(work, own, shape), pixels, inside, channel, shape), axis=0
        )
    mean = squeeze_back(part_net(work[0], part), vectors, product, outputs, shape) / (
        shape.height * shape.width
    )
    tl.debug_barrier()
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        gradient = load_map(target, pixels, inside, channel, shape)
        store_map(target, pixels, inside, gradient * outputs[None, :] + mean[None, :], shape)


@triton.jit
def conv_input_tile(work, part, number, pixels, shape):
    """float32 [M, lanes]: gradient of a convolution's input from its gradient map."""
    inputs = tl.load(part + INPUTS)
    outputs = tl.load(part + OUTPUTS)
    kernel = tl.load(part + KERNEL)
    lane = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    row = work[0] + tl.load(part + OFFSET)
    result = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for tap in range(0, num_taps):
        place, inside = shifted(pixels, tap, kernel, shape)
        for first in range(0, outputs, shape.chunk):
            channel = first + tl.arange(0, shape.chunk)
            values = load_map(gradient_at(work, number, shape), place, inside, channel, shape)
            column = (
                channel[:, None] * (inputs * num_taps)
                + lane[None, :] * num_taps
                + (num_taps - 1 - tap)
            )
            known = (channel < outputs)[:, None] & (lane < inputs)[None, :]
            weights = tl.load(row + column, mask=known, other=0.0)
            result = add_product(values, weights, result, work[1].dtype.element_ty, shape)
    return result


@triton.jit
def depth_input_tile(work, part, number, pixels, shape):
    """The same of a convolution of every channel by itself."""
    inputs = tl.load(part + INPUTS)
    kernel = tl.load(part + KERNEL)
    row = work[0] + tl.load(part + OFFSET)
    channel = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    result = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for tap in range(0, num_taps):
        place, inside = shifted(pixels, tap, kernel, shape)
        weights = tl.load(
            row + channel * num_taps + (num_taps - 1 - tap), mask=channel < inputs, other=0.0
        )
        values = load_map(gradient_at(work, number, shape), place, inside, channel, shape)
        result += values * weights[None, :]
    return result


@triton.jit
def hand_back(work, part, number, flags, gradient, shape):
    """From a part's gradient map to that of the part before, or to x of a seed not cut off."""
    kind = tl.load(part + KIND)
    channel = tl.arange(0, shape.lanes)
    if (number > 0) | ((flags & DETACHED) == 0):
        for first in range(0, shape.height * shape.width, shape.tile):
            pixels, inside = pixels_from(first, shape)
            result = tl.zeros((shape.tile, shape.lanes), tl.float32)
            if kind == CONV:
                result = conv_input_tile(work, part, number, pixels, shape)
            elif kind == DEPTH:
                result = depth_input_tile(work, part, number, pixels, shape)
            else:
                result = load_map(gradient_at(work, number, shape), pixels, inside, channel, shape)
            if number > 0:
                store_map(gradient_at(work, number - 1, shape), pixels, inside, result, shape)
            else:
                result += load_features(gradient, pixels, inside, shape)
                store_features(gradient, pixels, inside, result, shape)


@triton.jit
def slot_backward_kernel(slot, gradient, pooled, codes):
    """gradient [N, B, H*W, C] of the features behind a slot, to that before it, in place. Grid (N,
    B).

    Where a pool follows it is made from that of the pooled features.
    """
    env = tl.program_id(0).to(tl.int64)
    place = env * tl.num_programs(1) + tl.program_id(1)
    here = gradient + place * (slot.shape.height * slot.shape.width * slot.shape.channels)
    if slot.shape.pool == 2:
        unpool_image(here, pooled, codes, place, slot.shape)
        tl.debug_barrier()
    flags, head = member(slot, env)
    if flags & RUNNING:
        work = work_place(slot, env, place)
        count = tl.load(head + COUNT)
        blend_back(
            work,
            head,
            flags,
            tl.load(slot.alpha + env * slot.num_slots + slot.number),
            here,
            slot.shape,
        )
        tl.debug_barrier()
        for step in range(0, count):
            number = count - 1 - step
            part = head + (1 + number) * FIELDS
            kind = tl.load(part + KIND)
            if kind == CONV:
                conv_back(work, part, number, slot.shape)
            if kind == SOFT_NORM:
                soft_norm_back(work, part, number, slot.shape)
            if kind == EXCITE:
                excite_back(work, part, number, slot.shape)
            tl.debug_barrier()
            hand_back(work, part, number, flags, here, slot.shape)
            tl.debug_barrier()
