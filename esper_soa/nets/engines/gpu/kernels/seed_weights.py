"""Gradients of seeds' parameters from the work places of the slots, for all networks, slots and
parts in one launch.

A program sums over a part of the images, in their order; update.py adds the parts up. No atomics:
what a network gets does not depend on the others. Launched by slots.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from esper_soa.nets.engines.gpu.kernels.seed import (
    CONV,
    COUNT,
    DEPTH,
    EXCITE,
    FIELDS,
    FLAGS,
    FROZEN,
    GATED,
    INPUTS,
    KERNEL,
    KIND,
    NORMED,
    OFFSET,
    OUTPUTS,
    PRODUCT,
    RUNNING,
    SOFT_NORM,
    STRENGTH,
    TOTAL,
    VECTORS,
    add_product,
    gradient_at,
    input_values,
    load_map,
    member,
    pixels_from,
    saved_vector,
    shifted,
    vectors_at,
    work_place,
)
from esper_soa.nets.engines.gpu.kernels.squeeze import (
    gate_net,
    part_net,
    squeeze_weights,
    store_row,
)


@triton.jit
def conv_weights(slot, target, part, number, env, images, shape):
    """Gradient of a kernel [O, I, k, k], summed over images (first, last, first place)."""
    inputs = tl.load(part + INPUTS)
    outputs = tl.load(part + OUTPUTS)
    kernel = tl.load(part + KERNEL)
    lane = tl.arange(0, shape.lanes)
    num_taps = kernel * kernel
    for tap in range(0, num_taps):
        for first in range(0, inputs, shape.chunk):
            channel = first + tl.arange(0, shape.chunk)
            result = tl.zeros((shape.lanes, shape.chunk), tl.float32)
            for image in range(images[0], images[1]):
                work = work_place(slot, env, images[2] + image)
                for start in range(0, shape.height * shape.width, shape.tile):
                    pixels, here = pixels_from(start, shape)
                    gradient = load_map(gradient_at(work, number, shape), pixels, here, lane, shape)
                    place, inside = shifted(pixels, tap, kernel, shape)
                    values = input_values(work, part, number, place, inside, channel, shape)
                    kind = slot.maps.dtype.element_ty
                    result = add_product(tl.trans(gradient), values, result, kind, shape)
            column = lane[:, None] * (inputs * num_taps) + channel[None, :] * num_taps + tap
            known = (lane < outputs)[:, None] & (channel < inputs)[None, :]
            tl.store(target + tl.load(part + OFFSET) + column, result, mask=known)


@triton.jit
def depth_weights(slot, target, part, number, env, images, shape):
    """The same of a kernel [I, 1, k, k]."""
    inputs = tl.load(part + INPUTS)
    kernel = tl.load(part + KERNEL)
    lane = tl.arange(0, shape.lanes)
    for tap in range(0, kernel * kernel):
        result = tl.zeros((shape.lanes,), tl.float32)
        for image in range(images[0], images[1]):
            work = work_place(slot, env, images[2] + image)
            for start in range(0, shape.height * shape.width, shape.tile):
                pixels, here = pixels_from(start, shape)
                gradient = load_map(gradient_at(work, number, shape), pixels, here, lane, shape)
                place, inside = shifted(pixels, tap, kernel, shape)
                result += tl.sum(
                    gradient * input_values(work, part, number, place, inside, lane, shape), axis=0
                )
        column = tl.load(part + OFFSET) + lane * kernel * kernel + tap
        tl.store(target + column, result, mask=lane < inputs)


@triton.jit
def vector_sum(vectors, which: tl.constexpr, images, step, shape):
    """float32 [lanes]: one of a part's vectors, summed over images (first, last)."""
    result = tl.zeros((shape.lanes,), tl.float32)
    for image in range(images[0], images[1]):
        result += saved_vector(vectors + image * step, which, shape)
    return result


@triton.jit
def norm_weights(target, first, vectors, outputs, images, step, shape):
    """Gradients of a norm's scale and shift, in columns from `first` on."""
    store_row(target, first, vector_sum(vectors, PRODUCT, images, step, shape), outputs, shape)
    store_row(
        target, first + outputs, vector_sum(vectors, TOTAL, images, step, shape), outputs, shape
    )


@triton.jit
def part_weights(slot, target, part, number, env, images, shape):
    """Gradients of all parameters of one part, to their columns of the row `target`."""
    kind = tl.load(part + KIND)
    at = tl.load(part + OFFSET)
    outputs = tl.load(part + OUTPUTS)
    vectors = vectors_at(work_place(slot, env, images[2]), number + 1, shape)
    step: tl.constexpr = (shape.parts + 2) * VECTORS * shape.lanes
    if kind == CONV:
        conv_weights(slot, target, part, number, env, images, shape)
        if tl.load(part + FLAGS) & NORMED:
            kernel = tl.load(part + KERNEL)
            norm = at + outputs * tl.load(part + INPUTS) * kernel * kernel
            norm_weights(target, norm, vectors, outputs, images, step, shape)
    if kind == DEPTH:
        depth_weights(slot, target, part, number, env, images, shape)
    if kind == SOFT_NORM:
        store_row(target, at, vector_sum(vectors, STRENGTH, images, step, shape), 1, shape)
        norm_weights(target, at + 1, vectors, outputs, images, step, shape)
    if kind == EXCITE:
        net = part_net(slot.rows.base + env * slot.rows.env, part)
        squeeze_weights(net, target, vectors, images, step, shape)


class Share(NamedTuple):
    """Of what a launch sums up."""

    batch: int  # images of a network
    images: int  # of them in a split
    parts: tl.constexpr  # most that a blueprint has, in any slot


@triton.jit
def seed_weights_kernel(slots, targets, share, num_slots: tl.constexpr):
    """Gradients by part of the images, of seeds that learn, in all slots. Grid (N, splits, S *
    (parts + 1)).

    targets: of every slot partials [N, splits, width] as Rows of [splits * width]; columns of no
    parameter of a seed are left as they are.
    """
    each: tl.constexpr = share.parts + 1
    for slot in tl.static_range(num_slots):
        if tl.program_id(2) // each == slot:
            slot_weights(slots[slot], targets[slot], share, tl.program_id(2) % each)


@triton.jit
def slot_weights(slot, target, share, number):
    """Of part `number` of the seed in one slot of one network, for one split; the gate's last."""
    env = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    flags, head = member(slot, env)
    if ((flags & RUNNING) != 0) & ((flags & FROZEN) == 0):
        row = target.base + env * target.env + split * (target.env // tl.num_programs(1))
        images = (
            split * share.images,
            tl.minimum((split + 1) * share.images, share.batch),
            env * share.batch,
        )
        if number < tl.load(head + COUNT):
            part_weights(slot, row, head + (1 + number) * FIELDS, number, env, images, slot.shape)
        if (number == share.parts) & ((flags & GATED) != 0):
            work = work_place(slot, env, env * share.batch)
            step: tl.constexpr = (slot.shape.parts + 2) * VECTORS * slot.shape.lanes
            vectors = vectors_at(work, slot.shape.parts + 1, slot.shape)
            squeeze_weights(gate_net(work[0], slot.shape), row, vectors, images, step, slot.shape)
