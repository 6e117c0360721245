"""A slot's forward pass for all networks in one launch: every program reads what its network has
grown, and does that.

One program does one image of one network. It interprets the part program of the blueprint in
residence (program.py) and blends the seed into the features, in place; where no seed runs it
returns at once. Barriers stand wherever threads of a program read what others of it wrote. Launched
by slots.py.
"""

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels.pool import pool_image
from esper_soa.nets.engines.gpu.kernels.seed import (
    ABLATED,
    CENTRE,
    CONV,
    COUNT,
    DEPTH,
    EXCITE,
    FIELDS,
    FLAGS,
    GAIN,
    GATED,
    INPUTS,
    INVERSE,
    KERNEL,
    KIND,
    MAP,
    MEAN,
    MULTIPLIED,
    NORMED,
    OFFSET,
    OUTPUTS,
    REPLACING,
    RUNNING,
    SHIFT,
    SOFT_NORM,
    SOURCE,
    THROUGH,
    UNITS,
    add_product,
    group_moments,
    input_values,
    join_moments,
    load_map,
    map_at,
    member,
    output_values,
    parameters_at,
    pixels_from,
    save_vector,
    shifted,
    store_map,
    tanh,
    vectors_at,
    work_place,
)
from esper_soa.nets.engines.gpu.kernels.squeeze import gate_net, part_net, squeezed


@triton.jit
def load_features(features, pixels, inside, shape):
    """float32 [M, lanes] of one image [H*W, C]."""
    channel = tl.arange(0, shape.lanes)
    mask = inside[:, None] & (channel < shape.channels)[None, :]
    return tl.load(
        features + pixels[:, None] * shape.channels + channel[None, :], mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def store_features(features, pixels, inside, values, shape):
    """values [M, lanes] into one image [H*W, C]."""
    channel = tl.arange(0, shape.lanes)
    mask = inside[:, None] & (channel < shape.channels)[None, :]
    tl.store(features + pixels[:, None] * shape.channels + channel[None, :], values, mask=mask)


@triton.jit
def take_in(features, work, shape):
    """Map 0 and its vectors: x as it is."""
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        store_map(
            map_at(work, 0, shape),
            pixels,
            inside,
            load_features(features, pixels, inside, shape),
            shape,
        )
    zeros = tl.zeros((shape.lanes,), tl.float32)
    save_affine(vectors_at(work, 0, shape), zeros, zeros + 1.0, zeros, shape)


@triton.jit
def save_affine(vectors, centre, gain, shift, shape):
    """What a map's numbers stand for: (number - centre) gain + shift."""
    save_vector(vectors, CENTRE, centre, shape)
    save_vector(vectors, GAIN, gain, shape)
    save_vector(vectors, SHIFT, shift, shape)


@triton.jit
def conv_tile(work, part, number, pixels, shape):
    """float32 [M, lanes]: a convolution of what a part is given."""
    inputs = tl.load(part + INPUTS)
    outputs = tl.load(part + OUTPUTS)
    kernel = tl.load(part + KERNEL)
    output = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    row = work[0] + tl.load(part + OFFSET)
    result = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for tap in range(0, num_taps):
        place, inside = shifted(pixels, tap, kernel, shape)
        for first in range(0, inputs, shape.chunk):
            channel = first + tl.arange(0, shape.chunk)
            values = input_values(work, part, number, place, inside, channel, shape)
            column = output[None, :] * (inputs * num_taps) + channel[:, None] * num_taps + tap
            known = (channel < inputs)[:, None] & (output < outputs)[None, :]
            weights = tl.load(row + column, mask=known, other=0.0)
            result = add_product(values, weights, result, work[1].dtype.element_ty, shape)
    return result


@triton.jit
def forward_conv(work, part, number, shape):
    """Convolution into the part's map; its vectors are those of a group norm, where it has one."""
    target = map_at(work, tl.load(part + MAP), shape)
    outputs = tl.load(part + OUTPUTS)
    zeros = tl.zeros((shape.lanes,), tl.float32)
    moments = zeros, zeros, 0.0
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        values = conv_tile(work, part, number, pixels, shape)
        store_map(target, pixels, inside, values, shape)
        moments = join_moments(moments, values, inside)
    vectors = vectors_at(work, number + 1, shape)
    if tl.load(part + FLAGS) & NORMED:
        kernel = tl.load(part + KERNEL)
        at = tl.load(part + OFFSET) + outputs * tl.load(part + INPUTS) * kernel * kernel
        mean, inverse = group_moments(moments, part, shape)
        gain = parameters_at(work[0], at, outputs, shape) * inverse
        save_affine(
            vectors, mean, gain, parameters_at(work[0], at + outputs, outputs, shape), shape
        )
        save_vector(vectors, INVERSE, inverse, shape)
    else:
        save_affine(vectors, zeros, zeros + 1.0, zeros, shape)


@triton.jit
def forward_depth(work, part, number, shape):
    """Convolution of every channel by itself into the part's map."""
    inputs = tl.load(part + INPUTS)
    kernel = tl.load(part + KERNEL)
    row = work[0] + tl.load(part + OFFSET)
    channel = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    target = map_at(work, tl.load(part + MAP), shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        result = tl.zeros((shape.tile, shape.lanes), tl.float32)
        for tap in range(0, num_taps):
            place, there = shifted(pixels, tap, kernel, shape)
            weights = tl.load(row + channel * num_taps + tap, mask=channel < inputs, other=0.0)
            result += (
                input_values(work, part, number, place, there, channel, shape) * weights[None, :]
            )
        store_map(target, pixels, inside, result, shape)
    zeros = tl.zeros((shape.lanes,), tl.float32)
    save_affine(vectors_at(work, number + 1, shape), zeros, zeros + 1.0, zeros, shape)


@triton.jit
def input_moments(work, part, number, shape):
    """Moments by channel of what a part is given, which is kept in the part's own map, if any."""
    channel = tl.arange(0, shape.lanes)
    own = tl.load(part + MAP)
    zeros = tl.zeros((shape.lanes,), tl.float32)
    moments = zeros, zeros, 0.0
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        values = input_values(work, part, number, pixels, inside, channel, shape)
        if own != tl.load(part + SOURCE):
            store_map(map_at(work, own, shape), pixels, inside, values, shape)
        moments = join_moments(moments, values, inside)
    return moments


@triton.jit
def forward_norm(work, part, number, shape):
    """x + t (norm(x) - x) with t = tanh(strength): an affine map of every channel."""
    outputs = tl.load(part + OUTPUTS)
    at = tl.load(part + OFFSET)
    mean, inverse = group_moments(input_moments(work, part, number, shape), part, shape)
    strength = tanh(tl.load(work[0] + at + tl.arange(0, shape.lanes) * 0))
    scale = parameters_at(work[0], at + 1, outputs, shape)
    shift = parameters_at(work[0], at + 1 + outputs, outputs, shape)
    vectors = vectors_at(work, number + 1, shape)
    kept = (1.0 - strength) * mean
    save_affine(
        vectors, mean, 1.0 - strength + strength * scale * inverse, kept + strength * shift, shape
    )
    save_vector(vectors, INVERSE, inverse, shape)


@triton.jit
def forward_excite(work, part, number, shape):
    """x times a number per channel, from a squeeze of x."""
    mean, _, _ = input_moments(work, part, number, shape)
    units, outputs = squeezed(part_net(work[0], part), mean, shape)
    vectors = vectors_at(work, number + 1, shape)
    zeros = tl.zeros((shape.lanes,), tl.float32)
    save_affine(vectors, zeros, outputs, zeros, shape)
    save_vector(vectors, MEAN, mean, shape)
    save_vector(vectors, UNITS, units, shape)


@triton.jit
def forward_parts(work, head, shape):
    """All parts of the blueprint in residence."""
    for number in range(0, tl.load(head + COUNT)):
        part = head + (1 + number) * FIELDS
        kind = tl.load(part + KIND)
        if kind == CONV:
            forward_conv(work, part, number, shape)
        if kind == DEPTH:
            forward_depth(work, part, number, shape)
        if kind == SOFT_NORM:
            forward_norm(work, part, number, shape)
        if kind == EXCITE:
            forward_excite(work, part, number, shape)
        tl.debug_barrier()


@triton.jit
def seed_less_input(work, head, pixels, inside, x, shape):
    """float32 [M, lanes]: what the seed gives, less its input x."""
    last = tl.load(head + COUNT) - 1
    values = output_values(work, head + (1 + last) * FIELDS, last, pixels, inside, shape)
    return tl.where(tl.load(head + REPLACING) != 0, values - x, values)


@triton.jit
def gate_of(work, shape):
    """The gate's number for this image."""
    channel = tl.arange(0, shape.lanes)
    total = tl.zeros((shape.lanes,), tl.float32)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        total += tl.sum(load_map(map_at(work, 0, shape), pixels, inside, channel, shape), axis=0)
    mean = total / (shape.height * shape.width)
    units, outputs = squeezed(gate_net(work[0], shape), mean, shape)
    vectors = vectors_at(work, shape.parts + 1, shape)
    save_vector(vectors, MEAN, mean, shape)
    save_vector(vectors, UNITS, units, shape)
    save_vector(vectors, GAIN, outputs, shape)
    return tl.sum(outputs, axis=0)


@triton.jit
def blend(work, head, flags, alpha, features, shape):
    """host + alpha g (seed - host), or host (1 + alpha tanh(seed - host)), as nets/blend.py."""
    channel = tl.arange(0, shape.lanes)
    factor = alpha
    if flags & GATED:
        factor = alpha * gate_of(work, shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        x = load_map(map_at(work, 0, shape), pixels, inside, channel, shape)
        change = seed_less_input(work, head, pixels, inside, x, shape)
        if flags & MULTIPLIED:
            change = x * tanh(change)
        store_features(features, pixels, inside, x + factor * change, shape)


@triton.jit
def slot_forward_kernel(slot, features, pooled, codes):
    """features [N, B, H*W, C] through the slot in place; pooled ones beside. Grid (N, B)."""
    env = tl.program_id(0).to(tl.int64)
    place = env * tl.num_programs(1) + tl.program_id(1)
    here = features + place * (slot.shape.height * slot.shape.width * slot.shape.channels)
    flags, head = member(slot, env)
    if flags & RUNNING:
        work = work_place(slot, env, place)
        take_in(here, work, slot.shape)
        tl.debug_barrier()
        forward_parts(work, head, slot.shape)
        if (flags & THROUGH) == 0:
            blend(
                work,
                head,
                flags,
                tl.load(slot.alpha + env * slot.num_slots + slot.number),
                here,
                slot.shape,
            )
    if slot.shape.pool == 2:
        tl.debug_barrier()
        pool_image(here, pooled, codes, place, slot.shape)


@triton.jit
def copy_features(source, target, shape):
    """One image [H*W, C]."""
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels, inside = pixels_from(first, shape)
        store_features(target, pixels, inside, load_features(source, pixels, inside, shape), shape)


@triton.jit
def slot_branch_kernel(slot, source, target, spare, tree, batch, units):
    """target: features behind a slot in a validation pass, where rows of a network may part. Grid:
    any number.

    source: features [n, rows before, B, H*W, C]; target: [n, rows, B, ., C], pooled where a pool
    follows; units: n * rows * B; tree: (rows before, rows, int32 [n] of how many a network has,
    int32 [n, rows] of whence each comes: 2 * row before + whether a seed that can be left out takes
    part). A program does every so many images, one after the other, in one work place; spare:
    [programs, H*W, C], its features before a pool.
    """
    area: tl.constexpr = slot.shape.height * slot.shape.width * slot.shape.channels
    smaller: tl.constexpr = (slot.shape.height // 2) * (slot.shape.width // 2) * slot.shape.channels
    work_number = tl.program_id(0).to(tl.int64)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        place = work_number * 0 + unit
        image = place % batch
        row = place // batch % tree[1]
        env = place // (batch * tree[1])
        if row < tl.load(tree[2] + env):
            came = tl.load(tree[3] + env * tree[1] + row)
            before = source + ((env * tree[0] + came // 2) * batch + image) * area
            here = target + place * (area if slot.shape.pool == 1 else smaller)
            flags, head = member(slot, env)
            takes_part = ((flags & RUNNING) != 0) & (((flags & ABLATED) == 0) | (came % 2 == 1))
            if takes_part:
                work = work_place(slot, env, work_number)
                take_in(before, work, slot.shape)
                tl.debug_barrier()
                forward_parts(work, head, slot.shape)
                alpha = tl.load(slot.alpha + env * slot.num_slots + slot.number)
                if slot.shape.pool == 1:
                    blend(work, head, flags, alpha, here, slot.shape)
                else:
                    blend(work, head, flags, alpha, spare + work_number * area, slot.shape)
                    tl.debug_barrier()
                    pool_image(spare + work_number * area, target, None, place, slot.shape)
                tl.debug_barrier()
            else:
                if slot.shape.pool == 1:
                    copy_features(before, here, slot.shape)
                else:
                    pool_image(before, target, None, place, slot.shape)
