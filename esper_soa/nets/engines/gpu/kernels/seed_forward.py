"""A slot's forward pass for all networks in one launch, each with what it has grown.

One program does one image of one network. It interprets the part program of the blueprint in
residence (program.py) and blends the seed into the features, in place; where no seed runs it
returns at once. Barriers stand wherever threads of a program read what others of it wrote.
"""

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels import seed
from esper_soa.nets.engines.gpu.kernels.seed import map_at
from esper_soa.nets.engines.gpu.kernels.squeeze import gate_net, part_net, squeeze_forward
from esper_soa.nets.engines.gpu.kernels.tiles import add_product, load_map, store_map


@triton.jit
def copy_features(source, target, stride: tl.constexpr, shape):
    """One image [H*W, C] into memory with `stride` numbers per pixel."""
    channel = tl.arange(0, shape.lanes)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        place = source + span[0][:, None] * shape.channels + channel[None, :]
        known = span[1][:, None] & (channel < shape.channels)[None, :]
        store_map(target, span, tl.load(place, mask=known, other=0.0), stride)


@triton.jit
def load_input(features, work, shape):
    """Map 0 and its vectors: x as it is."""
    copy_features(features, map_at(work, 0, shape), shape.stride, shape)
    save_plain(seed.vectors_at(work, 0, shape), shape)


@triton.jit
def save_affine(vectors, centre, gain, shift, shape):
    """Save the meaning of a map's numbers: (number - centre) gain + shift."""
    seed.save_vector(vectors, seed.CENTRE, centre, shape)
    seed.save_vector(vectors, seed.GAIN, gain, shape)
    seed.save_vector(vectors, seed.SHIFT, shift, shape)


@triton.jit
def save_plain(vectors, shape):
    """A map's numbers stand for themselves."""
    zeros = tl.zeros((shape.lanes,), tl.float32)
    save_affine(vectors, zeros, zeros + 1.0, zeros, shape)


@triton.jit
def conv_tile(work, part, number, pixels, back: tl.constexpr, shape):
    """float32 [M, lanes]: a part's convolution; back: transposed, of its gradient map."""
    inputs = tl.load(part + seed.INPUTS)
    outputs = tl.load(part + seed.OUTPUTS)
    kernel = tl.load(part + seed.KERNEL)
    given = seed.part_input(work, part, number, shape)
    result = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for first_tap in range(0, kernel * kernel, shape.taps):
        for first in range(0, outputs if back else inputs, shape.columns):
            tap, channel = seed.columns_from(first_tap, first, shape.columns, shape)
            if back:
                source = seed.gradient_at(work, number, shape)
                values, _ = seed.map_taps(source, pixels, tap, channel, kernel, shape)
            else:
                values = seed.input_taps(given, pixels, tap, channel, kernel, shape)
            sizes = inputs, outputs, kernel * kernel
            weights = tap_weights(work, part, tap, channel, sizes, back, shape)
            result = add_product(values, weights.to(values.dtype), result, shape)
    return result


@triton.jit
def tap_weights(work, part, tap, channel, sizes, back: tl.constexpr, shape):
    """float32 [K, lanes]: a convolution's weights [O, I, taps] by (tap, channel) [K]."""
    inputs, outputs, num_taps = sizes
    lane = tl.arange(0, shape.lanes)
    row = work[0] + tl.load(part + seed.OFFSET)
    if back:
        column = (channel * (inputs * num_taps) + num_taps - 1 - tap)[:, None]
        column += (lane * num_taps)[None, :]
        known = (channel < outputs)[:, None] & (lane < inputs)[None, :]
    else:
        column = (channel * num_taps + tap)[:, None] + (lane * (inputs * num_taps))[None, :]
        known = (channel < inputs)[:, None] & (lane < outputs)[None, :]
    return tl.load(row + column, mask=known & (tap < num_taps)[:, None], other=0.0)


@triton.jit
def depth_tile(work, part, number, pixels, back: tl.constexpr, shape):
    """The same of a convolution of every channel by itself."""
    inputs = tl.load(part + seed.INPUTS)
    kernel = tl.load(part + seed.KERNEL)
    row = work[0] + tl.load(part + seed.OFFSET)
    channel = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    given = seed.part_input(work, part, number, shape)
    affine = seed.affine_of(given[1], given[2], channel, shape)
    result = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for tap in range(0, num_taps):
        span = seed.shift_pixels(pixels, tap, kernel, shape)
        column = channel * num_taps + (num_taps - 1 - tap if back else tap)
        weights = tl.load(row + column, mask=channel < inputs, other=0.0)
        if back:
            values = load_map(seed.gradient_at(work, number, shape), span, channel, shape.stride)
        else:
            values = seed.map_values(given[0], affine, span, shape)
        result += values * weights[None, :]
    return result


@triton.jit
def forward_conv(work, part, number, shape):
    """Convolution into the part's map; its vectors are those of a group norm, where it has one."""
    target = map_at(work, tl.load(part + seed.MAP), shape)
    outputs = tl.load(part + seed.OUTPUTS)
    moments = seed.no_moments(shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        values = conv_tile(work, part, number, span[0], False, shape)
        store_map(target, span, values, shape.stride)
        moments = seed.join_moments(moments, values, span[1])
    vectors = seed.vectors_at(work, number + 1, shape)
    if tl.load(part + seed.FLAGS) & seed.NORMED:
        at = tl.load(part + seed.OFFSET) + seed.kernel_size(part, outputs)
        mean, inverse = seed.group_moments(seed.all_moments(moments, shape), part, shape)
        gain = seed.parameters_at(work[0], at, outputs, shape.lanes) * inverse
        shift = seed.parameters_at(work[0], at + outputs, outputs, shape.lanes)
        save_affine(vectors, mean, gain, shift, shape)
        seed.save_vector(vectors, seed.INVERSE, inverse, shape)
    else:
        save_plain(vectors, shape)


@triton.jit
def forward_depth(work, part, number, shape):
    """Convolution of every channel by itself into the part's map."""
    target = map_at(work, tl.load(part + seed.MAP), shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        values = depth_tile(work, part, number, span[0], False, shape)
        store_map(target, span, values, shape.stride)
    save_plain(seed.vectors_at(work, number + 1, shape), shape)


@triton.jit
def input_moments(work, part, number, shape):
    """Moments by channel of a part's input, which is kept in the part's map, if it has one."""
    part_map = tl.load(part + seed.MAP)
    given = seed.part_input(work, part, number, shape)
    affine = seed.affine_of(given[1], given[2], tl.arange(0, shape.lanes), shape)
    moments = seed.no_moments(shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        values = seed.map_values(given[0], affine, span, shape)
        if part_map != given[3]:
            store_map(map_at(work, part_map, shape), span, values, shape.stride)
        moments = seed.join_moments(moments, values, span[1])
    return seed.all_moments(moments, shape)


@triton.jit
def forward_norm(work, part, number, shape):
    """x + t (norm(x) - x) with t = tanh(strength): an affine map of every channel."""
    outputs = tl.load(part + seed.OUTPUTS)
    at = tl.load(part + seed.OFFSET)
    mean, inverse = seed.group_moments(input_moments(work, part, number, shape), part, shape)
    strength = seed.tanh(tl.load(work[0] + at + tl.arange(0, shape.lanes) * 0))
    scale = seed.parameters_at(work[0], at + 1, outputs, shape.lanes)
    shift = seed.parameters_at(work[0], at + 1 + outputs, outputs, shape.lanes)
    vectors = seed.vectors_at(work, number + 1, shape)
    gain = 1.0 - strength + strength * scale * inverse
    save_affine(vectors, mean, gain, (1.0 - strength) * mean + strength * shift, shape)
    seed.save_vector(vectors, seed.INVERSE, inverse, shape)


@triton.jit
def forward_excite(work, part, number, shape):
    """x times a number per channel, from a squeeze of x."""
    mean, _ = input_moments(work, part, number, shape)
    units, outputs = squeeze_forward(part_net(work[0], part), mean, shape)
    vectors = seed.vectors_at(work, number + 1, shape)
    zeros = tl.zeros((shape.lanes,), tl.float32)
    save_affine(vectors, zeros, outputs, zeros, shape)
    seed.save_vector(vectors, seed.MEAN, mean, shape)
    seed.save_vector(vectors, seed.UNITS, units, shape)


@triton.jit
def forward_parts(work, head, shape):
    """All parts of the blueprint in residence."""
    for number in tl.range(0, tl.load(head + seed.COUNT), disable_licm=True):
        part = head + (1 + number) * seed.FIELDS
        kind = tl.load(part + seed.KIND)
        if kind == seed.CONV:
            forward_conv(work, part, number, shape)
        if kind == seed.DEPTH:
            forward_depth(work, part, number, shape)
        if kind == seed.SOFT_NORM:
            forward_norm(work, part, number, shape)
        if kind == seed.EXCITE:
            forward_excite(work, part, number, shape)
        tl.debug_barrier()


@triton.jit
def seed_output(work, head, shape):
    """Output of a seed: (map, its affine, whether it replaces the seed's input)."""
    last = tl.load(head + seed.COUNT) - 1
    given = seed.part_output(work, head + (1 + last) * seed.FIELDS, last, shape)
    return given[0], given[1], tl.load(head + seed.REPLACING) != 0


@triton.jit
def seed_residual(given, span, x, shape):
    """float32 [M, lanes]: of a `seed_output`, less the seed's input x."""
    values = seed.map_values(given[0], given[1], span, shape)
    return tl.where(given[2], values - x, values)


@triton.jit
def gate_of(work, shape):
    """The gate's number for this image."""
    channel = tl.arange(0, shape.lanes)
    total = tl.zeros((shape.tile, shape.lanes), tl.float32)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        total += load_map(map_at(work, 0, shape), span, channel, shape.stride)
    mean = tl.sum(total, axis=0) / (shape.height * shape.width)
    units, outputs = squeeze_forward(gate_net(work[0], shape), mean, shape)
    vectors = seed.vectors_at(work, shape.parts + 1, shape)
    seed.save_vector(vectors, seed.MEAN, mean, shape)
    seed.save_vector(vectors, seed.UNITS, units, shape)
    seed.save_vector(vectors, seed.GAIN, outputs, shape)
    return tl.sum(outputs, axis=0)


@triton.jit
def blend(work, head, flags, alpha, features, shape):
    """host + alpha g (seed - host), or host (1 + alpha tanh(seed - host)), as seeds/seeds.py."""
    channel = tl.arange(0, shape.lanes)
    factor = alpha
    if flags & seed.GATED:
        factor = alpha * gate_of(work, shape)
    given = seed_output(work, head, shape)
    for first in range(0, shape.height * shape.width, shape.tile):
        span = seed.pixels_from(first, shape)
        x = load_map(map_at(work, 0, shape), span, channel, shape.stride)
        change = seed_residual(given, span, x, shape)
        if flags & seed.MULTIPLIED:
            change = x * seed.tanh(change)
        store_map(features, span, x + factor * change, shape.channels)


@triton.jit
def pool_image(features, pooled, codes, place, shape):
    """The host's 2x2 max pool behind a slot: maxima [H/2 * W/2, C] of one image, NaN goes through;
    into `codes` the corner of each.
    """
    height: tl.constexpr = shape.height // 2
    width: tl.constexpr = shape.width // 2
    channel = tl.arange(0, shape.lanes)
    start = place * (height * width * shape.channels)
    for first in range(0, height * width, shape.tile):
        small = first + tl.arange(0, shape.tile)
        span = small, small < height * width
        best = tl.full((shape.tile, shape.lanes), float("-inf"), tl.float32)
        code = tl.zeros((shape.tile, shape.lanes), tl.int32)
        for corner in tl.static_range(4):
            row = small // width * 2 + corner // 2
            pixel = row * shape.width + small % width * 2 + corner % 2
            values = load_map(features, (pixel, span[1]), channel, shape.channels)
            better = (values > best) | (values != values)
            code = tl.where(better, corner, code)
            best = tl.where(better, values, best)
        store_map(pooled + start, span, best, shape.channels)
        if codes is not None:
            store_map(codes + start, span, code, shape.channels)


@triton.jit
def slot_forward_kernel(slot, features, pooled, codes):
    """features [N, B, H*W, C] through the slot in place; pooled ones beside. Grid (N, B)."""
    env = tl.program_id(0).to(tl.int64)
    place = env * tl.num_programs(1) + tl.program_id(1)
    pointer = features + place * (slot.shape.height * slot.shape.width * slot.shape.channels)
    flags, head = seed.member(slot, env)
    if flags & seed.RUNNING:
        work = seed.work_place(slot, env, place)
        load_input(pointer, work, slot.shape)
        tl.debug_barrier()
        forward_parts(work, head, slot.shape)
        if (flags & seed.THROUGH) == 0:
            blend(work, head, flags, seed.alpha_of(slot, env), pointer, slot.shape)
    if slot.shape.pool == 2:
        tl.debug_barrier()
        pool_image(pointer, pooled, codes, place, slot.shape)


@triton.jit
def slot_branch_kernel(slot, source, target, spare, tree, batch, units):
    """target: features behind a slot in a validation pass, where rows may part. Grid: any number.

    source: features [n, rows before, B, H*W, C]; target: [n, rows, B, ., C], pooled where a pool
    follows; units: n * rows * B; tree: (rows before, rows, int32 [n] of how many a network has,
    int32 [n, rows] of whence each comes: 2 * row before + whether a seed that can be left out takes
    part). A program does every so many images, one after the other, in one work place; spare:
    [programs, H*W, C], its features before a pool.
    """
    area: tl.constexpr = slot.shape.height * slot.shape.width * slot.shape.channels
    smaller: tl.constexpr = (slot.shape.height // 2) * (slot.shape.width // 2) * slot.shape.channels
    work_number = tl.program_id(0).to(tl.int64)
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), disable_licm=True):
        place = work_number * 0 + unit
        image = place % batch
        row = place // batch % tree[1]
        env = place // (batch * tree[1])
        if row < tl.load(tree[2] + env):
            branch_row = tl.load(tree[3] + env * tree[1] + row)
            before = source + ((env * tree[0] + branch_row // 2) * batch + image) * area
            pointer = target + place * (area if slot.shape.pool == 1 else smaller)
            flags, head = seed.member(slot, env)
            is_active = ((flags & seed.ABLATED) == 0) | (branch_row % 2 == 1)
            if ((flags & seed.RUNNING) != 0) & is_active:
                work = seed.work_place(slot, env, work_number)
                load_input(before, work, slot.shape)
                tl.debug_barrier()
                forward_parts(work, head, slot.shape)
                alpha = seed.alpha_of(slot, env)
                if slot.shape.pool == 1:
                    blend(work, head, flags, alpha, pointer, slot.shape)
                else:
                    blend(work, head, flags, alpha, spare + work_number * area, slot.shape)
                    tl.debug_barrier()
                    pool_image(spare + work_number * area, target, None, place, slot.shape)
                tl.debug_barrier()
            else:
                if slot.shape.pool == 1:
                    copy_features(before, pointer, slot.shape.channels, slot.shape)
                else:
                    pool_image(before, target, None, place, slot.shape)
