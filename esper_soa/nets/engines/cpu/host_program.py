"""Hosts for the native kernels: rows of operations in an order in which each follows those whose
results it takes. Convolution blocks are written as they are, all else is traced.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import cast

import numpy as np
from torch import nn

from esper_soa.config.registry import collect_faults
from esper_soa.nets import batched
from esper_soa.nets.engines.cpu import operations, program
from esper_soa.nets.engines.cpu.operations import Operation, Program, require
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.conv import ConvSegment
from esper_soa.nets.model.head import MEAN_LINEAR
from esper_soa.nets.model.host import IMAGE_SHAPE, HostShape
from esper_soa.nets.model.modules import sequence
from esper_soa.nets.model.parts import Table
from esper_soa.nets.model.residual import ResidualSegment
from esper_soa.nets.model.segments import FeatureShape, Segment
from esper_soa.nets.model.tracing import Trace, trace
from esper_soa.nets.model.user_module import SKELETON_SEED, Factory, make_module, skeleton
from esper_soa.nets.model.user_segment import UserHost, UserSegment

COLOURS = (1, 3)  # channels of images


@lru_cache(maxsize=64)
def host_obstacle(shape: HostShape) -> str:
    """Why hosts are no program for the kernels; "" where they are."""
    return _obstacle(partial(host_program, shape))


def seed_obstacle(blueprint: Architecture, shape: HostShape) -> str:
    """Why seeds of the blueprint are no program in a slot of the hosts; "" where they are."""
    found = (slot_obstacle(blueprint, slot.shape) for slot in shape.slots)
    return next(filter(None, found), "")


@lru_cache(maxsize=256)
def slot_obstacle(blueprint: Architecture, slot: FeatureShape) -> str:
    """The same of a slot of such features."""
    if blueprint.module is None:
        return "" if program.runs(blueprint) else f"there is none for parts of {blueprint.name}"
    return _obstacle(partial(seed_program, blueprint.module.make, slot))


def _obstacle(make: Callable[[], object]) -> str:
    faults = list[str]()
    with collect_faults(faults, "when it is traced it raises"):
        try:
            make()
        except operations.UnknownOperationError as error:
            return f"there is none for {error}"
    return "".join(faults)


@lru_cache(maxsize=64)
def host_program(shape: HostShape) -> np.ndarray:
    """OPERATION [operations] of hosts, the last of them the head; UnknownOperationError where there
    is none.
    """
    samples = shape.input_shape
    square = len(samples) == len(IMAGE_SHAPE) and samples[1] == samples[2]
    require(square and samples[0] in COLOURS, f"samples {list(samples)}")
    channels, side, _ = samples
    host = Program()
    value = Operation(None, {"outputs": channels, "height": side, "width": side})
    for segment in shape.segments:
        if isinstance(segment, ConvSegment):
            value = host.add(value, _block(segment, *host.starts))
            host.shown = None  # it gives channels of pixels in order
        elif segment.kind == MEAN_LINEAR:
            column = host.starts[0]
            bias = column + math.prod(segment.parameters[0].shape)
            value = host.add(value, {"weight": column, "shift": bias})
        else:
            value = host.extend(_trace(_module(segment), segment.input_shape), value)
            if max(segment.slots) >= 0:
                value = host.put_slot(value, max(segment.slots))
        host.starts[0] += Table(segment.parameters).total
        host.starts[1] += Table(segment.statistics).total
    if isinstance(shape.modules, UserHost):
        host.end(value)
    return operations.table(host.operations)


@lru_cache(maxsize=256)
def seed_program(make: Factory, slot: FeatureShape) -> np.ndarray:
    """OPERATION [operations] of a seed that is a module, in a slot of such features; the last gives
    what it gives. UnknownOperationError where there is none.
    """
    require(len(slot) == len(IMAGE_SHAPE), f"features {list(slot)}")
    channels, side, _ = slot
    module = make_module(make, channels, SKELETON_SEED)
    sizes = {"outputs": channels, "height": side, "width": side}
    given = Operation(None, operations.PLAIN | sizes, num_reads=1)
    seed = Program()
    value = seed.extend(_trace(module, slot), given)
    gives_new = value is not given and not value.num_reads and seed.gives_images(value)
    require(gives_new, f"{type(module).__name__}, which gives what it read")
    seed.operations.remove(value)
    return operations.table([*seed.operations, value])


def _module(segment: Segment) -> nn.Module:
    if isinstance(segment, UserSegment):
        host = skeleton(segment.host.make, segment.host.classes, None, thread=0)
        return cast(nn.Sequential, host)[segment.number]
    require(isinstance(segment, ResidualSegment), f"segments that are {segment.kind}")
    (part,) = segment.plain_parts()
    return sequence([each._asdict() for each in part.layers], residual=True)


def _trace(module: nn.Module, shape: FeatureShape) -> Trace:
    """The trace in training, of a module that does the same in eval mode."""
    traced, in_eval = (trace(module, shape, mode) for mode in (True, False))
    same = _described(traced) == _described(in_eval)
    require(same, f"{type(module).__name__}, which does otherwise in eval mode")
    return traced


def _described(traced: Trace) -> list[object]:
    """The calls, but for what a batch norm does otherwise in training."""
    return [
        (call.name, {**call.arguments, "training": None}, [*call.values])
        for call in traced.calls
        if not operations.counts(call)
    ]


def _block(block: ConvSegment, column: int, moving: int) -> dict[str, float]:
    kernel = block.channels * block.inputs * block.kernel**2
    return operations.PLAIN | {
        "outputs": block.channels,
        "height": block.size,
        "width": block.size,
        "kernel": block.kernel,
        "padding": block.kernel // 2,
        "together": 0,
        "activation": operations.RECTIFY,
        "pooled": block.pooled,
        "before": block.slot_before_pool,
        "after": block.slot_after_pool,
        "weight": column,
        "scale": column + kernel,
        "shift": column + kernel + block.channels,
        "mean": moving,
        "variance": moving + block.channels,
        "eps": batched.NORM_EPS,
        "momentum": batched.BATCH_NORM_MOMENTUM,
    }
