"""The host's classifier: mean of the pixels, linear, cross-entropy and its gradient.

A program does one image; sums over images are taken by a second kernel, in their order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu.kernels.tiles import Rows, has_ended, load_map, start_of, store_map


class KernelHead(NamedTuple):
    """Weights of the classifiers of n networks, and labels; sizes are compile-time constants."""

    weight: Rows  # [K, C]
    bias: Rows  # [K]
    labels: Tensor  # int64 [n or 1, images]; -1 does not count
    labels_env: int  # labels from network to network, 0 where they share them
    counter: Tensor  # int32 [1]: the batch
    batch: int
    words: Rows  # int32 [n, S], see slot_flags.py
    area: tl.constexpr  # pixels of an image
    channels: tl.constexpr
    classes: tl.constexpr
    channel_lanes: tl.constexpr  # powers of two that hold them
    class_lanes: tl.constexpr
    tile: tl.constexpr  # pixels


class HeadOutputs(NamedTuple):
    """Outputs by image of n networks, for the sums over images."""

    mean: Tensor  # float32 [n, B, channel_lanes], of the pixels
    logit: Tensor  # float32 [n, B, class_lanes], gradient
    loss: Tensor  # float32 [n, B]
    correct: Tensor  # int32 [n, B]


@triton.jit
def pixel_mean(features, head):
    """float32 [channel_lanes]: mean over the pixels of features [area, C]."""
    channel = tl.arange(0, head.channel_lanes)
    total = tl.zeros((head.channel_lanes,), tl.float32)
    for first in range(0, head.area, head.tile):
        pixels = first + tl.arange(0, head.tile)
        span = pixels, pixels < head.area
        total += tl.sum(load_map(features, span, channel, head.channels), axis=0)
    return total / head.area


@triton.jit
def labels_of(head, env):
    """Pointer to the labels of a network's batch."""
    return head.labels + env * head.labels_env + tl.load(head.counter) * head.batch


@triton.jit
def head_logits(features, head, env, image):
    """(mean, weights, logits, loss, whether the label wins as int32, the label) of one image.

    As torch's argmax: the first of equals wins, and NaN is greatest.
    """
    classes = tl.arange(0, head.class_lanes)
    known = classes < head.classes
    mean = pixel_mean(features, head)
    row = classes[:, None]
    column = tl.arange(0, head.channel_lanes)[None, :]
    place = start_of(head.weight, env) + row * head.channels + column
    mask = (row < head.classes) & (column < head.channels)
    weights = tl.load(place, mask=mask, other=0.0)
    bias = tl.load(start_of(head.bias, env) + classes, mask=known, other=0.0)
    logits = tl.sum(weights * mean[None, :], axis=1) + bias
    label = tl.load(labels_of(head, env) + image)
    masked = tl.where(known, logits, float("-inf"))
    largest = tl.max(tl.where(masked == masked, masked, float("-inf")), axis=0)
    log_sum = largest + tl.log(tl.sum(tl.where(known, tl.exp(logits - largest), 0.0), axis=0))
    loss = log_sum - tl.sum(tl.where(classes == label, logits, 0.0), axis=0)
    broken = known & (logits != logits)
    best = tl.where(tl.sum(broken.to(tl.int32), axis=0) > 0, broken, known & (logits == largest))
    winner = tl.min(tl.where(best, classes, head.class_lanes), axis=0)
    return mean, weights, logits - log_sum, loss, (winner == label).to(tl.int32), label


@triton.jit
def head_kernel(features, gradient, answers, head):
    """Loss, right answers, gradients of an image, of its features [n, B, ., C]. Grid (n, B)."""
    env = tl.program_id(0).to(tl.int64)
    if has_ended(head.words, env):
        return
    image = tl.program_id(1)
    place = env * head.batch + image
    start = place * (head.area * head.channels)
    mean, weights, logs, loss, correct, label = head_logits(features + start, head, env, image)
    classes = tl.arange(0, head.class_lanes)
    channel = tl.arange(0, head.channel_lanes)
    logit = tl.exp(logs) - (classes == label).to(tl.float32)
    logit = tl.where(classes < head.classes, logit, 0.0) / head.batch
    tl.store(answers.mean + place * head.channel_lanes + channel, mean)
    tl.store(answers.logit + place * head.class_lanes + classes, logit)
    tl.store(answers.loss + place, loss)
    tl.store(answers.correct + place, correct)
    back = tl.sum(weights * logit[:, None], axis=0) / head.area
    for first in range(0, head.area, head.tile):
        pixels = first + tl.arange(0, head.tile)
        values = tl.zeros((head.tile, 1), tl.float32) + back[None, :]
        store_map(gradient + start, (pixels, pixels < head.area), values, head.channels)


@triton.jit
def head_sums_kernel(answers, partials, width, sums, head):
    """Gradients of weight and bias by part of the images, to rows [n, splits] `width` apart.

    Grid (n, splits). sums: loss float32 [n] and right answers int64 [n] grow by those of the batch.
    """
    env = tl.program_id(0).to(tl.int64)
    if has_ended(head.words, env):
        return
    split = tl.program_id(1)
    classes = tl.arange(0, head.class_lanes)
    channel = tl.arange(0, head.channel_lanes)
    weights = tl.zeros((head.class_lanes, head.channel_lanes), tl.float32)
    bias = tl.zeros((head.class_lanes,), tl.float32)
    share = tl.cdiv(head.batch, tl.num_programs(1))
    for image in range(split * share, tl.minimum((split + 1) * share, head.batch)):
        place = env * head.batch + image
        logit = tl.load(answers.logit + place * head.class_lanes + classes)
        mean = tl.load(answers.mean + place * head.channel_lanes + channel)
        weights += logit[:, None] * mean[None, :]
        bias += logit
    target = partials + (env * tl.num_programs(1) + split) * width
    mask = (classes < head.classes)[:, None] & (channel < head.channels)[None, :]
    tl.store(target + classes[:, None] * head.channels + channel[None, :], weights, mask=mask)
    tl.store(target + head.classes * head.channels + classes, bias, mask=classes < head.classes)
    if split == 0:
        loss, correct = batch_sums(answers, env * head.batch, head)
        tl.store(sums[0] + env, tl.load(sums[0] + env) + loss / head.batch)
        tl.store(sums[1] + env, tl.load(sums[1] + env) + correct)


@triton.jit
def batch_sums(answers, first, head):
    """(loss float32, right answers int64) summed over the images of a batch."""
    loss = tl.zeros((head.tile,), tl.float32)
    correct = tl.zeros((head.tile,), tl.int64)
    for begin in range(0, head.batch, head.tile):
        image = begin + tl.arange(0, head.tile)
        loss += tl.load(answers.loss + first + image, mask=image < head.batch, other=0.0)
        correct += tl.load(answers.correct + first + image, mask=image < head.batch, other=0)
    return tl.sum(loss, axis=0), tl.sum(correct, axis=0)


@triton.jit
def head_evaluate_kernel(features, answers, right, branches, head):
    """Loss and right answers of one image by row; those without a label give 0. Grid (n * rows, B).

    right: (int8 [n, images] of the answers of row 0 in the whole pass, images). branches: (rows,
    int32 [n] of how many of them a network has).
    """
    unit = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1)
    env = unit // branches[0]
    row = unit % branches[0]
    if row < tl.load(branches[1] + env):
        place = unit * head.batch + image
        pointer = features + place * (head.area * head.channels)
        _, _, _, loss, correct, label = head_logits(pointer, head, env, image)
        tl.store(answers.loss + place, tl.where(label < 0, 0.0, loss))
        correct = tl.where(label < 0, 0, correct)
        tl.store(answers.correct + place, correct)
        if row == 0:
            number = tl.load(head.counter) * head.batch + image
            tl.store(right[0] + env * right[1] + number, correct.to(tl.int8))


@triton.jit
def evaluation_sums_kernel(answers, sums, branches, head):
    """Sums grow by a batch's: loss float64 [n] of row 0, right answers [n, rows], images [n].

    Grid (n * rows,); branches as in head_evaluate_kernel; counts are int64.
    """
    unit = tl.program_id(0).to(tl.int64)
    env = unit // branches[0]
    row = unit % branches[0]
    if row < tl.load(branches[1] + env):
        loss, correct = batch_sums(answers, unit * head.batch, head)
        tl.store(sums[1] + unit, tl.load(sums[1] + unit) + correct)
        if row == 0:
            tl.store(sums[0] + env, tl.load(sums[0] + env) + loss.to(tl.float64))
            labelled = tl.zeros((head.tile,), tl.int64)
            start = labels_of(head, env)
            for begin in range(0, head.batch, head.tile):
                image = begin + tl.arange(0, head.tile)
                labels = tl.load(start + image, mask=image < head.batch, other=-1)
                labelled += (labels >= 0).to(tl.int64)
            tl.store(sums[2] + env, tl.load(sums[2] + env) + tl.sum(labelled, axis=0))


@triton.jit
def advance_kernel(counter):
    """The next batch. Grid (1,)."""
    tl.store(counter, tl.load(counter) + 1)
