"""Hosts of users' own, found by the setting task.host and looked at before anything is built of
them; their slots.

What a chain of parts or of modules must be is told by the findings below.
conformance.py looks closer.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import torch
from torch import nn

from esper_soa.errors import SettingError, one_line
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec, TaskConfig, enabled_slots
from esper_soa.nets.host import HostShape, host_shape
from esper_soa.nets.model.host_parts import ConvBlock, HostChain, Residual
from esper_soa.nets.model.own_module import OwnChain, made
from esper_soa.nets.model.parameters import Table
from esper_soa.nets.own_blueprints import module_findings, task_blueprints
from esper_soa.registry import HOST, RAISED, Part, find, is_reference, name_in, num_required

SETTING = "task.host"
PROBE_SEED = 1
PROBED = 2  # networks, and images of each, that a chain is tried on
TAKEN = re.compile(r"input|r\d+c\d+")  # names of other parts of a grown network


def task_shape(task: TaskConfig, slots: Sequence[str]) -> HostShape:
    """Hosts of the task with these slots, a user's own among them, and what can grow in them.

    Raises SettingError where the settings name what is not there or cannot work.
    """
    enabled = task_slots(task, slots)
    return host_shape(task, enabled, task_blueprints(task.blueprints, enabled), task_host(task))


def task_slots(task: TaskConfig, names: Sequence[str]) -> tuple[SlotSpec, ...]:
    """The run's slots, of its host, row-major; `names` in any order. Raises SettingError."""
    host = task_host(task)
    return enabled_slots(task, list(names), None if host is None else offered_slots(host))


def task_host(task: TaskConfig) -> HostChain | OwnChain | None:
    """The user's own host of the task, None without; SettingError where it names no host."""
    if not is_reference(task.host):
        return None
    part = find(HOST, task.host, SETTING)
    try:
        host = host_of(part, name_in(task.host), task.num_classes)
    except ValueError as error:
        raise SettingError(SETTING, task.host, "a host", f"{one_line(error)}.") from error
    faults = _findings(host)
    if faults:
        raise SettingError(
            SETTING, task.host, "a host that can be trained", "; ".join(faults) + "."
        )
    return host


def host_of(part: Part, name: str, num_classes: int) -> HostChain | OwnChain:
    """What a function or class marked as a host stands for; ValueError where that is none."""
    required = num_required(part)
    if required == 1:
        return OwnChain(part, num_classes)  # type: ignore[arg-type]
    if required > 1:
        raise ValueError(
            f"host {name}: it is called with the number of classes or with nothing, and wants more"
        )
    given = part()
    if isinstance(given, nn.Module):
        raise ValueError(
            f"host {name}: it gives a module, so it must be called with the number of classes"
        )
    if not isinstance(given, tuple):
        raise ValueError(
            f"host {name}: it gives {one_line(given)}, no tuple of segments (ConvBlock, Residual)"
        )
    foreign = [type(one).__name__ for one in given if not isinstance(one, ConvBlock | Residual)]
    if foreign:
        raise ValueError(
            f"host {name}: it gives a {foreign[0]} among its segments, no ConvBlock and no Residual"
        )
    return HostChain(given)


def offered_slots(host: HostChain | OwnChain) -> tuple[SlotSpec, ...]:
    """Every slot, row-major: r0c{i} behind segment i, before its pool, r1c{i} behind its pool."""
    if isinstance(host, OwnChain):
        last = max(len(host.segments) - 2, 1)
        return tuple(
            SlotSpec(f"r0c{place}", 0, place, one.gives[0], one.gives[1], place / last)
            for place, one in enumerate(host.segments[:-1])
            if one.square
        )
    first = list[SlotSpec]()
    second = list[SlotSpec]()
    channels = IMAGE_CHANNELS
    sides = host.sides()
    for place, part in enumerate(host.parts):
        channels = part.channels if isinstance(part, ConvBlock) else channels
        depth = place / (len(host.parts) - 1)
        first.append(SlotSpec(f"r0c{place}", 0, place, channels, sides[place], depth))
        if sides[place + 1] < sides[place]:
            second.append(SlotSpec(f"r1c{place}", 1, place, channels, sides[place + 1], depth))
    return (*first, *second)


def host_findings(host: HostChain | OwnChain) -> tuple[str, ...]:
    """What keeps hosts like this from being trained, in words."""
    if isinstance(host, HostChain):
        fault = host.fault()
        return (fault,) if fault else ()
    try:
        module = made(host.make, host.classes, PROBE_SEED)
        found = _chain_findings(module) if isinstance(module, nn.Module) else [_no_chain(module)]
        return tuple(found or _shape_findings(host) or _together_findings(host))
    except RAISED as error:
        return (f"it raises {type(error).__name__}: {one_line(error)}",)


# of a host that several parts of a program ask for
_findings = lru_cache(maxsize=64)(host_findings)


def _no_chain(module: object) -> str:
    return (
        f"it gives a {type(module).__name__}, which is no nn.Sequential: a host is a chain of "
        "segments"
    )


def _chain_findings(module: nn.Module) -> list[str]:
    """What the module is, and what it keeps."""
    if not isinstance(module, nn.Sequential):
        return [_no_chain(module)]
    if type(module).forward is not nn.Sequential.forward:
        return [
            "its forward pass is its own: a host hands images from segment to segment, as "
            "nn.Sequential does"
        ]
    if len(module) < 2:
        return [
            "it has less than two segments: the last gives the logits, and seeds stand behind the "
            "others"
        ]
    found = module_findings(module)
    taken = [name for name, _ in module.named_children() if TAKEN.fullmatch(name)]
    if taken:
        found.append(f"its segment {taken[0]} has the name of another part of a grown network")
    if len(set(map(id, module))) < len(module):
        found.append("two of its segments are one, which rows of weights cannot say")
    state = module.state_dict(keep_vars=True)
    passing = [name for name, _ in module.named_buffers() if name not in state]
    if passing:
        found.append(
            f"its buffers {', '.join(passing)} are not persistent, so that grown networks would "
            "lack them"
        )
    return found


def _shape_findings(host: OwnChain) -> list[str]:
    """What comes out of the segments."""
    segments = host.segments
    found = []
    if segments[-1].gives != (host.classes,):
        given = ", ".join(map(str, ("B", *segments[-1].gives)))
        found.append(
            f"its last segment {segments[-1].name} gives [{given}], not logits [B, {host.classes}]"
        )
    if not any(one.square for one in segments[:-1]):
        found.append(
            "none of its segments but the last gives features [B, C, H, H], in which a seed could "
            "stand"
        )
    return found


def _together_findings(host: OwnChain) -> list[str]:
    """What the segments of several networks run into at once, in training and in eval mode."""
    rows, kept = host.initial_rows(torch.arange(PROBED), torch.float32)
    own = Table(tuple(one for segment in host.segments for one in segment.parameters)).unpack(rows)
    buffers = Table(tuple(one for segment in host.segments for one in segment.statistics))
    for training in (True, False):
        features = torch.zeros(PROBED, PROBED * IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
        rest = iter(own)
        state = iter(buffers.unpack(kept.clone()))
        for number, segment in enumerate(host.segments):
            values = list(islice(rest, len(segment.parameters)))
            moving = list(islice(state, len(segment.buffers)))
            try:
                with torch.no_grad():
                    if training:
                        moving = [one.reshape(-1) for one in moving]
                    run = host.train if training else host.infer
                    features = run(number, values, moving, features, PROBED)
            except RAISED as error:
                return [_failure(segment.name, training, error)]
            if features.shape != (PROBED, PROBED * segment.gives[0], *segment.gives[1:]):
                return [
                    f"its segment {segment.name} gives features of another shape in training than "
                    "in eval mode"
                ]
            if not features.is_floating_point():
                return [
                    f"its segment {segment.name} gives {features.dtype}, no floating-point numbers"
                ]
    return []


def _failure(name: str, training: bool, error: BaseException) -> str:
    if "random operation" in str(error):
        return (
            f"its segment {name} draws random numbers (as Dropout does), which would not be those "
            "of an env's own stream: leave it out"
        )
    mode = "training" if training else "eval"
    return (
        f"its segment {name} raises {type(error).__name__} for several networks in {mode} mode: "
        f"{one_line(error)}"
    )
