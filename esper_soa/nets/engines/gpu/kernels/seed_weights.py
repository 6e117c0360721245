"""Gradients of seeds' parameters: all networks, slots and parts in one launch.

A program sums over a part of the images, in their order; update.py adds the parts up. No atomics:
what a network gets does not depend on the others.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels import seed, squeeze
from esper_soa.nets.engines.gpu.kernels.tiles import add_product, load_map


@triton.jit
def conv_weights(slot, target, part, number, env, images, shape):
    """Gradient of a kernel [O, I, k, k], summed over images (first, last, first place)."""
    inputs = tl.load(part + seed.INPUTS)
    outputs = tl.load(part + seed.OUTPUTS)
    kernel = tl.load(part + seed.KERNEL)
    num_taps = kernel * kernel
    lane = tl.arange(0, shape.lanes)
    for first_tap in range(0, num_taps, shape.group_taps):
        for first in range(0, inputs, shape.group):
            tap, channel = seed.columns_from(first_tap, first, shape.group, shape)
            result = tl.zeros((shape.group, shape.lanes), tl.float32)
            for image in range(images[0], images[1]):
                work = seed.work_place(slot, env, images[2] + image)
                given = seed.part_input(work, part, number, shape)
                source = seed.gradient_at(work, number, shape)
                for start in range(0, shape.height * shape.width, shape.tile):
                    pixels, known = seed.pixels_from(start, shape)
                    inside = known[:, None] & (lane < shape.stride)[None, :]
                    place = source + pixels[:, None] * shape.stride + lane[None, :]
                    gradient = tl.load(place, mask=inside, other=0.0)
                    values = seed.input_taps(given, pixels, tap, channel, kernel, shape)
                    result = add_product(tl.trans(values), gradient, result, shape)
            column = (channel * num_taps + tap)[:, None] + (lane * (inputs * num_taps))[None, :]
            known = (lane < outputs)[None, :] & ((channel < inputs) & (tap < num_taps))[:, None]
            tl.store(target + tl.load(part + seed.OFFSET) + column, result, mask=known)


@triton.jit
def depth_weights(slot, target, part, number, env, images, shape):
    """The same of a kernel [I, 1, k, k]."""
    inputs = tl.load(part + seed.INPUTS)
    kernel = tl.load(part + seed.KERNEL)
    lane = tl.arange(0, shape.lanes)
    for tap in range(0, kernel * kernel):
        result = tl.zeros((shape.lanes,), tl.float32)
        for image in range(images[0], images[1]):
            work = seed.work_place(slot, env, images[2] + image)
            given = seed.part_input(work, part, number, shape)
            affine = seed.affine_of(given[1], given[2], lane, shape)
            source = seed.gradient_at(work, number, shape)
            for start in range(0, shape.height * shape.width, shape.tile):
                span = seed.pixels_from(start, shape)
                gradient = load_map(source, span, lane, shape.stride)
                span = seed.shift_pixels(span[0], tap, kernel, shape)
                values = seed.map_values(given[0], affine, span, shape)
                result += tl.sum(gradient * values, axis=0)
        column = tl.load(part + seed.OFFSET) + lane * kernel * kernel + tap
        tl.store(target + column, result, mask=lane < inputs)


@triton.jit
def sum_vectors(target, first, count, vectors, which: tl.constexpr, images, shape):
    """One of a part's vectors, summed over images (first, last), to columns from `first` on."""
    result = tl.zeros((shape.lanes,), tl.float32)
    for image in range(images[0], images[1]):
        result += seed.saved_vector(seed.of_image(vectors, image, shape), which, shape)
    squeeze.store_row(target, first, result, count)


@triton.jit
def norm_weights(target, first, vectors, outputs, images, shape):
    """Gradients of a norm's scale and shift, in columns from `first` on."""
    sum_vectors(target, first, outputs, vectors, seed.PRODUCT, images, shape)
    sum_vectors(target, first + outputs, outputs, vectors, seed.TOTAL, images, shape)


@triton.jit
def part_weights(slot, target, part, number, env, images, shape):
    """Gradients of all parameters of one part, to their columns of the row `target`."""
    kind = tl.load(part + seed.KIND)
    at = tl.load(part + seed.OFFSET)
    outputs = tl.load(part + seed.OUTPUTS)
    work = seed.work_place(slot, env, images[2])
    vectors = seed.vectors_at(work, number + 1, shape)
    if kind == seed.CONV:
        conv_weights(slot, target, part, number, env, images, shape)
        if tl.load(part + seed.FLAGS) & seed.NORMED:
            norm = at + seed.kernel_size(part, outputs)
            norm_weights(target, norm, vectors, outputs, images, shape)
    if kind == seed.DEPTH:
        depth_weights(slot, target, part, number, env, images, shape)
    if kind == seed.SOFT_NORM:
        sum_vectors(target, at, 1, vectors, seed.STRENGTH, images, shape)
        norm_weights(target, at + 1, vectors, outputs, images, shape)
    if kind == seed.EXCITE:
        net = squeeze.part_net(work[0], part)
        squeeze.squeeze_weights(net, target, vectors, images, shape)


class Share(NamedTuple):
    """The part of the images that a program sums up."""

    batch: int  # images of a network
    images: int  # of them in a split
    parts: tl.constexpr  # most that a blueprint has, in any slot


@triton.jit
def seed_weights_kernel(slots, targets, share, num_slots: tl.constexpr):
    """Gradients of seeds that learn, by part of the images. Grid (N, splits, S * (parts + 1)).

    targets: of every slot partials [N, splits, width] as Rows of [splits * width]; columns of no
    parameter of a seed are left as they are.
    """
    each: tl.constexpr = share.parts + 1
    for slot in tl.static_range(num_slots):
        if tl.program_id(2) // each == slot:
            slot_weights(slots[slot], targets[slot], share, tl.program_id(2) % each)


@triton.jit
def slot_weights(slot, target, share, number):
    """Gradients of part `number` of the seed in a slot of a network; the gate's come last."""
    env = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    flags, head = seed.member(slot, env)
    if ((flags & seed.RUNNING) != 0) & ((flags & seed.FROZEN) == 0):
        row = target.base + env * target.env + split * (target.env // tl.num_programs(1))
        last = tl.minimum((split + 1) * share.images, share.batch)
        images = split * share.images, last, env * share.batch
        if number < tl.load(head + seed.COUNT):
            part = head + (1 + number) * seed.FIELDS
            part_weights(slot, row, part, number, env, images, slot.shape)
        if (number == share.parts) & ((flags & seed.GATED) != 0):
            work = seed.work_place(slot, env, images[2])
            vectors = seed.vectors_at(work, slot.shape.parts + 1, slot.shape)
            net = squeeze.gate_net(work[0], slot.shape)
            squeeze.squeeze_weights(net, row, vectors, images, slot.shape)
