"""Blueprints and hosts of users, found by task.blueprints and task.host and looked at before
anything is built of them; lab/conformance.py looks closer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from esper_soa.config import registry
from esper_soa.config.nets import IMAGES, SlotSpec, TaskConfig, host_slots, sort_slots
from esper_soa.nets.model import blueprints
from esper_soa.nets.model import host as hosts
from esper_soa.nets.model.parts import Table, are_parts
from esper_soa.nets.model.segments import FeatureShape, Forward
from esper_soa.nets.model.user_module import UserModule, make_module
from esper_soa.nets.model.user_segment import UserHost, children_of
from esper_soa.system.errors import check, one_line
from esper_soa.vocabulary import NUM_BLUEPRINTS

PROBE_SEED = 1
NUM_PROBED = 2  # networks, and images of each, that a part is tried on
PLACE_WORDS = ("", "positions", "pixels")  # of features, by TOPOLOGIES
RESERVED_NAME = re.compile(r"input|r\d+c\d+")  # names of other parts of a grown network
ARGUMENT_WORDS = {
    registry.BLUEPRINT: "the channels of a slot",
    registry.HOST: "the number of classes",
}
BATCHED_CALL = "for several networks at once it raises"
RANDOM_WORDS = "random operation"  # in torch's error on such an operation under vmap
DRAWS_WORDS = "draws random numbers"
DROPOUT_ADVICE = "as Dropout does), which would not be those of an env's own stream: leave it out"
DRAWS_RANDOM = f"{DRAWS_WORDS} ({DROPOUT_ADVICE}"


def task_shape(
    task: TaskConfig, slots: Sequence[str], inputs: FeatureShape = hosts.IMAGE_SHAPE
) -> hosts.HostShape:
    """Hosts of the task, for images of the shape `inputs`, with these slots and what can grow
    there; SettingError if it cannot.
    """
    pools = task.num_pools if task.host == "chain" else 0
    allowed = f"so few that of images of data.size={inputs[1]} a pixel is left"
    check(inputs[1] >= 2**pools, "task.num_pools", pools, allowed=allowed)
    enabled = task_slots(task, slots, inputs)
    offered = task_blueprints(task.blueprints, enabled)
    host = task_host(task, inputs)
    return hosts.host_shape(task, enabled, offered, host=host, inputs=inputs)


def task_slots(
    task: TaskConfig, names: Sequence[str], inputs: FeatureShape = hosts.IMAGE_SHAPE
) -> tuple[SlotSpec, ...]:
    """The run's slots, of its host, row-major; `names` in any order. Raises SettingError.

    Of a user's host r0c{i} stands behind segment i, before its pool, r1c{i} behind its pool.
    """
    host = task_host(task, inputs)
    if host is None:
        return sort_slots(task, list(names), host_slots(task, inputs[1]))
    *body, _ = host.segments({})
    slots = [
        SlotSpec(
            f"r{row}c{at}",
            row,
            at,
            channels=channels,
            size=axes[0] if axes else 0,
            depth=at / max(len(body) - 1, 1),
            axes=len(axes),
        )
        for at, segment in enumerate(body)
        for row, (channels, *axes) in enumerate(segment.slot_shapes)
    ]
    return sort_slots(task, list(names), tuple(sorted(slots, key=lambda spec: spec.row)))


def task_host(task: TaskConfig, inputs: FeatureShape = hosts.IMAGE_SHAPE) -> hosts.Host | None:
    """The user's host of the task, None without; SettingError where task.host names no host."""
    if not registry.is_reference(task.host):
        return None
    part = registry.find(registry.HOST, task.host, "task.host")
    with registry.raise_faults("task.host", task.host, "a host that can be trained") as faults:
        host = host_of(part, registry.name_in(task.host), task.classes, inputs=inputs)
        faults += host_findings(host, task.classes)
    return host


def task_blueprints(offered: Sequence[str], slots: Sequence[SlotSpec]) -> blueprints.Blueprints:
    """The blueprints of `offered` (task.blueprints), of the package and of users, that fit into the
    slots.

    Those of users have the codes from NUM_BLUEPRINTS on, in the order of `offered`. Raises
    SettingError, which says what is wrong with a blueprint.
    """
    setting = "task.blueprints"
    kinds = sorted({spec.topology for spec in slots})
    packaged = [part for kind in kinds for part in blueprints.PACKAGED_BLUEPRINTS.get(kind, ())]
    every = [blueprints.NOOP, *(blueprint for blueprint in packaged if blueprint.name in offered)]
    known = {blueprint.name for blueprint in every}
    for name in (name for name in offered if not registry.is_reference(name)):
        allowed = f"a list of blueprints for {' and '.join(kinds)}, which the slots have"
        check(name in known, setting, name, allowed=allowed)
    for place, reference in enumerate(filter(registry.is_reference, offered)):
        part = registry.find(registry.BLUEPRINT, reference, setting)
        allowed = "a blueprint that can stand in the slots"
        with registry.raise_faults(setting, reference, allowed) as faults:
            blueprint = architecture_of(part, registry.name_in(reference), NUM_BLUEPRINTS + place)
            shapes = {spec.shape for spec in slots if blueprint.fits(spec)}
            if not shapes:
                faults.append(f"it takes {blueprint.topology}, which no slot has")
            for shape in sorted(shapes):
                faults += blueprint_findings(blueprint, shape)
            every.append(blueprint)
    return tuple(every)


def architecture_of(part: registry.Part, name: str, code: int) -> blueprints.Architecture:
    """The blueprint of a marked function or class; ValueError if it is none."""
    result = _result_of(registry.BLUEPRINT, part, name)
    if result is part:
        module = UserModule(part, vars(part).get(registry.TOPOLOGY, IMAGES))  # type: ignore[arg-type]
        return blueprints.Architecture(code, name, (module,), residual=False)
    if isinstance(result, blueprints.Architecture):
        return replace(result, code=code, name=name)
    if not are_parts(result):
        problem = f"no tuple of parts ({blueprints.PART_NAMES}) and no Architecture"
        raise ValueError(f"blueprint {name}: it gives {result}, {problem}")
    return blueprints.Architecture(code, name, result)  # type: ignore[arg-type]


def host_of(
    part: registry.Part, name: str, num_classes: int, inputs: FeatureShape = hosts.IMAGE_SHAPE
) -> hosts.Host:
    """The host of a marked function or class; ValueError if it is none."""
    result = _result_of(registry.HOST, part, name)
    if result is part:
        return UserHost(part, num_classes, inputs)  # type: ignore[arg-type]
    if isinstance(result, hosts.Host):
        return result
    kinds = [kind.__name__ for kind in hosts.HOST_PARTS]
    if not isinstance(result, tuple):
        problem = f"no tuple of segments ({', '.join(kinds)})"
        raise ValueError(f"host {name}: it gives {result}, {problem}")
    unsupported = [type(part).__name__ for part in result if not isinstance(part, hosts.HOST_PARTS)]
    if unsupported:
        problem = f"a {unsupported[0]} among its segments, no {' and no '.join(kinds)}"
        raise ValueError(f"host {name}: it gives {problem}")
    return hosts.HostChain(result, num_classes, inputs)


def _result_of(kind: str, part: registry.Part, name: str) -> object:
    required = registry.num_required(part)
    argument = ARGUMENT_WORDS[kind]
    if required > 1:
        problem = f"it is called with {argument} or with nothing, and wants more"
        raise ValueError(f"{kind} {name}: {problem}")
    result = part if required else part()
    if isinstance(result, nn.Module):
        raise ValueError(f"{kind} {name}: it gives a module, so it must be called with {argument}")
    return result


def tensor_findings(
    what: str, value: object, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device
) -> Iterator[str]:
    """Reasons why `value` is no such tensor; dtype None: of any floating-point numbers."""
    if not isinstance(value, Tensor):
        yield f"{what} is a {type(value).__name__}, not a tensor"
        return
    if list(value.shape) != list(shape):
        yield f"{what} is of shape {list(value.shape)}, not {list(shape)}"
    if not value.is_floating_point() if dtype is None else value.dtype != dtype:
        yield f"{what} is of {value.dtype}, not {dtype or 'of floating-point numbers'}"
    if value.device != device:
        yield f"{what} is on {value.device}, not on {device}"
    if value.requires_grad:
        yield f"{what} has a gradient, and nobody learns from it"


def blueprint_findings(blueprint: blueprints.Architecture, shape: FeatureShape) -> list[str]:
    """Reasons why seeds of the blueprint cannot stand in a slot of features of this shape."""
    part = blueprint.module
    channels, *axes = shape
    if part is None:
        return [] if blueprints.seed_table(blueprint, channels).total else ["it has no parameters"]
    x = torch.zeros(NUM_PROBED, *shape)
    findings = list[str]()
    with registry.collect_faults(findings):
        module = make_module(part.make, channels, PROBE_SEED)
        if isinstance(module, nn.Module):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                before = torch.get_rng_state()
                out = module(x.clone())
                draws = not torch.equal(torch.get_rng_state(), before)
            findings += _module_findings(module)
            if draws:
                findings.append(f"it {DRAWS_RANDOM}")
            buffers = ", ".join(name for name, _ in module.named_buffers())
            if buffers:
                findings.append(f"it keeps buffers ({buffers}), which all networks would share")
            findings += tensor_findings("its output", out, x.shape, dtype=x.dtype, device=x.device)
        else:
            findings.append(f"it gives a {type(module).__name__}, not an nn.Module")
    if not findings:
        with registry.collect_faults(findings, BATCHED_CALL), torch.no_grad():
            rows = part.initial_rows(channels, torch.arange(NUM_PROBED), x.dtype)
            parameters = Table(part.parameters(channels, channels)).unpack(rows)
            part.forward(parameters, torch.cat([x] * NUM_PROBED, dim=1))
    sides = "x".join(map(str, axes))
    places = f" of {sides} {PLACE_WORDS[len(axes)]}" * bool(axes)
    return [f"with {channels} channels{places} {fault}" for fault in findings]


def _module_findings(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    faults = {
        "want no gradient, but all are trained": lambda tensor: not tensor.requires_grad,
        "are no floating-point numbers": lambda tensor: not tensor.is_floating_point(),
        "have no shape before a first pass": lambda x: isinstance(x, UninitializedParameter),
    }
    for words, wrong in faults.items():
        names = ", ".join(name for name, tensor in parameters.items() if wrong(tensor))
        if names:
            yield f"its parameters {names} {words}"
    if not parameters:
        yield "it has no parameters"
    if len(set(map(id, parameters.values()))) < len(parameters):
        yield "two of its parameters are one, which rows of weights cannot say"
    values = (item for part in module.modules() for item in vars(part).items())
    names = ", ".join(name for name, value in values if isinstance(value, Tensor))
    if names:
        what = f"tensors that are no parameters or buffers ({names})"
        yield f"it keeps {what}, which all networks would share"


def host_findings(host: hosts.Host, classes: int) -> tuple[str, ...]:
    """Reasons why such hosts cannot be trained; ValueError for segments that are no chain."""
    if isinstance(host, UserHost):
        return _sequential_findings(host)
    shape = hosts.host_shape(TaskConfig(), (), host=host)
    findings = []
    if len(shape.segments) < 3:
        findings.append("it has less than two segments")
    if shape.num_classes != classes:
        findings.append(f"it has {shape.num_classes} classes, not task.num_classes={classes}")
    return tuple(findings)


@lru_cache(maxsize=64)  # several parts of a program ask for it
def _sequential_findings(host: UserHost) -> tuple[str, ...]:
    findings = list[str]()
    with registry.collect_faults(findings):
        module = make_module(host.make, host.classes, PROBE_SEED)
        if not isinstance(module, nn.Sequential):
            kind = type(module).__name__
            reason = "which is no nn.Sequential: a host is a chain of segments"
            return (f"it gives a {kind}, {reason}",)
        if type(module).forward is not nn.Sequential.forward:
            expectation = "a host hands images from segment to segment, as nn.Sequential does"
            return (f"its forward pass is its own: {expectation}",)
        if len(module) < 2:
            expectation = "the last gives the logits, and seeds stand behind the others"
            return (f"it has less than two segments: {expectation}",)
        kept = list(_kept_findings(module))
        findings += kept
        *inner, last = children_of(host)
        if last.output_shape != (host.classes,):
            shape = ", ".join(map(str, ("B", *last.output_shape)))
            problem = f"gives [{shape}], not logits [B, {host.classes}]"
            findings.append(f"its last segment {last.name} {problem}")
        if not any(segment.slot_shapes for segment in inner):
            problem = "gives features [B, C, H, H], in which a seed could stand"
            findings.append(f"none of its segments but the last {problem}")
        if not kept:  # several networks cannot be put together with it
            findings += _batched_findings(host)
    return tuple(findings)


def _kept_findings(module: nn.Sequential) -> Iterator[str]:
    yield from _module_findings(module)
    reserved = [name for name, _ in module.named_children() if RESERVED_NAME.fullmatch(name)]
    if reserved:
        yield f"its segments {', '.join(reserved)} have names of other parts of a grown network"
    if len(set(map(id, module))) < len(module):
        yield "two of its segments are one, which rows of weights cannot say"
    state = module.state_dict(keep_vars=True)
    passing = ", ".join(name for name, _ in module.named_buffers() if name not in state)
    if passing:
        yield f"its buffers {passing} are not persistent, so that grown networks would lack them"


@torch.no_grad()
def _batched_findings(host: UserHost) -> list[str]:
    shape = hosts.host_shape(TaskConfig(), (), host=host)
    run = Forward(None, NUM_PROBED, torch.float32)
    rows, statistics = hosts.initial_hosts(shape, torch.arange(NUM_PROBED), torch.float32)
    parameters = shape.parameters.unpack(rows)
    for training in (True, False):
        x = torch.cat([torch.zeros(NUM_PROBED, *host.inputs)] * NUM_PROBED, dim=1)
        buffers = shape.statistics.unpack(statistics.clone())
        buffers = [buffer.reshape(-1) for buffer in buffers] if training else buffers
        for segment, values in hosts.split_values(children_of(host), parameters, buffers):
            what = f"its segment {segment.plain_parts()[0].name}"
            try:
                if training:
                    x = segment.train(run, values, x)
                else:
                    x = segment.infer(run, segment.fold(values), x)
            except registry.RAISED as error:
                if RANDOM_WORDS in str(error):
                    return [f"{what} {DRAWS_RANDOM}"]
                mode = f"for several networks in {'training' if training else 'eval'} mode"
                return [f"{what} raises {type(error).__name__} {mode}: {one_line(error)}"]
            channels, *axes = segment.output_shape
            if x.shape != (NUM_PROBED, NUM_PROBED * channels, *axes):
                return [f"{what} gives features of another shape in training than in eval mode"]
            if not x.is_floating_point():
                return [f"{what} gives {x.dtype}, no floating-point numbers"]
    return []
