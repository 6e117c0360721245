"""Blueprints and hosts of users' own, found by task.blueprints and task.host and looked at before
anything is built of them; what a run's hosts are then.

What they must be is told by the findings below; conformance.py looks closer.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from esper_soa.errors import SettingError, one_line
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec, TaskConfig, enabled_slots
from esper_soa.nets.host import HostShape, host_shape
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, Blueprints, seed_table
from esper_soa.nets.model.host_parts import PART_NAMES, ConvBlock, HostChain, Residual, are_parts
from esper_soa.nets.model.own_module import OwnChain, OwnModule, made
from esper_soa.nets.model.parameters import Table
from esper_soa.registry import (
    BLUEPRINT,
    HOST,
    RAISED,
    Part,
    find,
    is_reference,
    name_in,
    num_required,
)
from esper_soa.vocabulary import NUM_BLUEPRINTS

PROBE_SEED = 1
PROBED = 2  # networks, and images of each, that a part is tried on
TAKEN = re.compile(r"input|r\d+c\d+")  # names of other parts of a grown network
ARGUMENTS = {BLUEPRINT: "the channels of a slot", HOST: "the number of classes"}


def task_shape(task: TaskConfig, slots: Sequence[str]) -> HostShape:
    """Hosts of the task with these slots, a user's own among them, and what can grow in them.

    Raises SettingError where the settings name what is not there or cannot work.
    """
    enabled = task_slots(task, slots)
    return host_shape(task, enabled, task_blueprints(task.blueprints, enabled), task_host(task))


def task_slots(task: TaskConfig, names: Sequence[str]) -> tuple[SlotSpec, ...]:
    """The run's slots, of its host, row-major; `names` in any order. Raises SettingError."""
    host = task_host(task)
    return enabled_slots(task, list(names), None if host is None else _offered_slots(host))


def task_host(task: TaskConfig) -> HostChain | OwnChain | None:
    """The user's own host of the task, None without; SettingError where it names no host."""
    if not is_reference(task.host):
        return None
    part = find(HOST, task.host, "task.host")
    try:
        host = host_of(part, name_in(task.host), task.num_classes)
    except ValueError as error:
        raise SettingError("task.host", task.host, "a host", f"{one_line(error)}.") from error
    faults = _findings(host)
    if faults:
        told = "; ".join(faults) + "."
        raise SettingError("task.host", task.host, "a host that can be trained", told)
    return host


def task_blueprints(offered: Sequence[str], slots: Sequence[SlotSpec]) -> Blueprints:
    """The package's blueprints, and users' own among `offered` (task.blueprints), which can stand
    in these slots.

    Own ones have the codes from NUM_BLUEPRINTS on, in the order of `offered`. Raises SettingError,
    which says what is wrong with one of them.
    """
    setting = "task.blueprints"
    found = list(BLUEPRINTS)
    for place, reference in enumerate(filter(is_reference, offered)):
        part = find(BLUEPRINT, reference, setting)
        try:
            one = architecture_of(part, name_in(reference), NUM_BLUEPRINTS + place)
        except ValueError as error:
            raise SettingError(setting, reference, "a blueprint", f"{one_line(error)}.") from error
        sizes = sorted({(spec.channels, spec.size) for spec in slots})
        faults = [fault for size in sizes for fault in blueprint_findings(one, *size)]
        if faults:
            told = "; ".join(dict.fromkeys(faults)) + "."
            raise SettingError(setting, reference, "a blueprint that can stand in the slots", told)
        found.append(one)
    return tuple(found)


def architecture_of(part: Part, name: str, code: int) -> Architecture:
    """What a function or class marked as a blueprint stands for; ValueError where that is none."""
    given = _given(BLUEPRINT, part, name)
    if given is part:
        return Architecture(code, name, (OwnModule(part),), residual=False)  # type: ignore[arg-type]
    if isinstance(given, Architecture):
        return replace(given, code=code, name=name)
    if not are_parts(given):
        told = f"no tuple of parts ({PART_NAMES}) and no Architecture"
        raise ValueError(f"blueprint {name}: it gives {one_line(given)}, {told}")
    return Architecture(code, name, given)  # type: ignore[arg-type]


def host_of(part: Part, name: str, num_classes: int) -> HostChain | OwnChain:
    """What a function or class marked as a host stands for; ValueError where that is none."""
    given = _given(HOST, part, name)
    if given is part:
        return OwnChain(part, num_classes)  # type: ignore[arg-type]
    if not isinstance(given, tuple):
        told = "no tuple of segments (ConvBlock, Residual)"
        raise ValueError(f"host {name}: it gives {one_line(given)}, {told}")
    foreign = [type(one).__name__ for one in given if not isinstance(one, ConvBlock | Residual)]
    if foreign:
        told = f"it gives a {foreign[0]} among its segments, no ConvBlock and no Residual"
        raise ValueError(f"host {name}: {told}")
    return HostChain(given)


def _given(kind: str, part: Part, name: str) -> object:
    """What a part gives that is called without an argument; itself where it is called with one."""
    required = num_required(part)
    argument = ARGUMENTS[kind]
    if required > 1:
        told = f"it is called with {argument} or with nothing, and wants more"
        raise ValueError(f"{kind} {name}: {told}")
    given = part if required else part()
    if isinstance(given, nn.Module):
        raise ValueError(f"{kind} {name}: it gives a module, so it must be called with {argument}")
    return given


def _offered_slots(host: HostChain | OwnChain) -> tuple[SlotSpec, ...]:
    """Every slot, row-major: r0c{i} behind segment i, before its pool, r1c{i} behind its pool."""
    if isinstance(host, OwnChain):
        last = max(len(host.segments) - 2, 1)
        return tuple(
            SlotSpec(f"r0c{place}", 0, place, one.gives[0], one.gives[1], place / last)
            for place, one in enumerate(host.segments[:-1])
            if one.square
        )
    found = list[SlotSpec]()
    channels = IMAGE_CHANNELS
    sides = host.sides()
    for place, part in enumerate(host.parts):
        channels = part.channels if isinstance(part, ConvBlock) else channels
        depth = place / (len(host.parts) - 1)
        found.append(SlotSpec(f"r0c{place}", 0, place, channels, sides[place], depth))
        if sides[place + 1] < sides[place]:
            found.append(SlotSpec(f"r1c{place}", 1, place, channels, sides[place + 1], depth))
    return tuple(sorted(found, key=lambda spec: spec.row))


# --- what keeps a part from being trained, in words


def blueprint_findings(blueprint: Architecture, channels: int, size: int) -> list[str]:
    """What keeps seeds of the blueprint from a slot of these channels, height, width, in words."""
    if blueprint.module is not None:
        found = _seed_findings(blueprint.module, torch.zeros(PROBED, channels, size, size))
        return [f"with {channels} channels of {size}x{size} pixels {fault}" for fault in found]
    return [] if seed_table(blueprint, channels).total else ["it has no parameters"]


def _seed_findings(part: OwnModule, x: Tensor) -> list[str]:
    """Of a module for features like x [B, C, H, W]."""
    channels = x.shape[1]
    try:
        module = made(part.make, channels, PROBE_SEED)
        if not isinstance(module, nn.Module):
            return [f"it gives a {type(module).__name__}, not an nn.Module"]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = module(x.clone())
    except RAISED as error:
        return [f"it raises {type(error).__name__}: {one_line(error)}"]
    found = _module_findings(module)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        found.append(f"it keeps buffers ({', '.join(buffers)}), which all networks would share")
    found += _output_findings(out, x)
    if found:
        return found
    try:
        rows = part.initial_rows(channels, torch.arange(PROBED), x.dtype)
        own = Table(part.parameters(channels, channels)).unpack(rows)
        with torch.no_grad():
            part.forward(own, torch.cat([x] * PROBED, dim=1))
    except RAISED as error:
        return [f"for several networks at once it raises {type(error).__name__}: {one_line(error)}"]
    return []


def _output_findings(out: object, x: Tensor) -> list[str]:
    if not isinstance(out, Tensor):
        return [f"it gives a {type(out).__name__}, not a tensor"]
    found = []
    if out.shape != x.shape:
        given = list(x.shape)
        found.append(f"it gives features of shape {list(out.shape)} for features of shape {given}")
    if out.dtype != x.dtype:
        found.append(f"it gives {out.dtype} for {x.dtype}")
    if out.device != x.device:
        found.append(f"it gives features on {out.device} for features on {x.device}")
    return found


def _module_findings(module: nn.Module) -> list[str]:
    """What keeps the parameters of a module, as they are, from being rows of weights."""
    found = []
    parameters = dict(module.named_parameters(remove_duplicate=False))
    faults = {
        "want no gradient, but all are trained": lambda one: not one.requires_grad,
        "are no floating-point numbers": lambda one: not one.is_floating_point(),
        "have no shape before a first pass": lambda one: isinstance(one, UninitializedParameter),
    }
    for words, wrong in faults.items():
        names = [name for name, one in parameters.items() if wrong(one)]
        if names:
            found.append(f"its parameters {', '.join(names)} {words}")
    if not parameters:
        found.append("it has no parameters")
    if len(set(map(id, parameters.values()))) < len(parameters):
        found.append("two of its parameters are one, which rows of weights cannot say")
    values = (item for part in module.modules() for item in vars(part).items())
    kept = [name for name, one in values if isinstance(one, Tensor)]
    if kept:
        told = f"that are no parameters or buffers ({', '.join(kept)})"
        found.append(f"it keeps tensors {told}, which all networks would share")
    return found


def host_findings(host: HostChain | OwnChain) -> tuple[str, ...]:
    """What keeps hosts like this from being trained, in words."""
    if isinstance(host, HostChain):
        fault = host.fault()
        return (fault,) if fault else ()
    try:
        module = made(host.make, host.classes, PROBE_SEED)
        return tuple(_chain_findings(module) or _shape_findings(host) or _together_findings(host))
    except RAISED as error:
        return (f"it raises {type(error).__name__}: {one_line(error)}",)


# of a host that several parts of a program ask for
_findings = lru_cache(maxsize=64)(host_findings)


def _chain_findings(module: object) -> list[str]:
    """What the module is, and what it keeps."""
    if not isinstance(module, nn.Sequential):
        kind = type(module).__name__
        return [f"it gives a {kind}, which is no nn.Sequential: a host is a chain of segments"]
    if type(module).forward is not nn.Sequential.forward:
        told = "a host hands images from segment to segment, as nn.Sequential does"
        return [f"its forward pass is its own: {told}"]
    if len(module) < 2:
        told = "the last gives the logits, and seeds stand behind the others"
        return [f"it has less than two segments: {told}"]
    found = _module_findings(module)
    taken = [name for name, _ in module.named_children() if TAKEN.fullmatch(name)]
    if taken:
        found.append(f"its segment {taken[0]} has the name of another part of a grown network")
    if len(set(map(id, module))) < len(module):
        found.append("two of its segments are one, which rows of weights cannot say")
    state = module.state_dict(keep_vars=True)
    passing = ", ".join(name for name, _ in module.named_buffers() if name not in state)
    if passing:
        told = "are not persistent, so that grown networks would lack them"
        found.append(f"its buffers {passing} {told}")
    return found


def _shape_findings(host: OwnChain) -> list[str]:
    """What comes out of the segments."""
    *inner, last = host.segments
    found = []
    if last.gives != (host.classes,):
        given = ", ".join(map(str, ("B", *last.gives)))
        found.append(
            f"its last segment {last.name} gives [{given}], not logits [B, {host.classes}]"
        )
    if not any(one.square for one in inner):
        told = "gives features [B, C, H, H], in which a seed could stand"
        found.append(f"none of its segments but the last {told}")
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
            if training:
                moving = [one.reshape(-1) for one in moving]
            run = host.train if training else host.infer
            told = f"its segment {segment.name}"
            try:
                with torch.no_grad():
                    features = run(number, values, moving, features, PROBED)
            except RAISED as error:
                return [f"{told} {_failure(training, error)}"]
            if features.shape != (PROBED, PROBED * segment.gives[0], *segment.gives[1:]):
                return [f"{told} gives features of another shape in training than in eval mode"]
            if not features.is_floating_point():
                return [f"{told} gives {features.dtype}, no floating-point numbers"]
    return []


def _failure(training: bool, error: BaseException) -> str:
    if "random operation" in str(error):
        told = "which would not be those of an env's own stream: leave it out"
        return f"draws random numbers (as Dropout does), {told}"
    mode = "training" if training else "eval"
    return f"raises {type(error).__name__} for several networks in {mode} mode: {one_line(error)}"
