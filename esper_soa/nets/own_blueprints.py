"""Blueprints of users' own, found by task.blueprints and looked at before any is built.

What a blueprint must be is told by the findings below; conformance.py looks closer.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from esper_soa.errors import SettingError, one_line
from esper_soa.nets.config import SlotSpec
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, Blueprints, seed_table
from esper_soa.nets.model.own_module import Factory, OwnModule, made
from esper_soa.nets.model.parameters import Table
from esper_soa.nets.model.parts import Conv, Depthwise, Excite, SoftNorm
from esper_soa.registry import BLUEPRINT, RAISED, Part, find, is_reference, name_in, num_required
from esper_soa.vocabulary import NUM_BLUEPRINTS

SETTING = "task.blueprints"
PARTS = (Conv, Depthwise, SoftNorm, Excite)
PROBE_SEED = 1


def task_blueprints(offered: Sequence[str], slots: Sequence[SlotSpec]) -> Blueprints:
    """The package's blueprints, and users' own among `offered` (task.blueprints), which can stand
    in these slots.

    Own ones have the codes from NUM_BLUEPRINTS on, in the order of `offered`. Raises SettingError,
    which says what is wrong with one of them.
    """
    return (*BLUEPRINTS, *_own(offered, slots))


def _own(offered: Sequence[str], slots: Sequence[SlotSpec]) -> list[Architecture]:
    found = []
    for place, reference in enumerate(filter(is_reference, offered)):
        part = find(BLUEPRINT, reference, SETTING)
        try:
            one = architecture_of(part, name_in(reference), NUM_BLUEPRINTS + place)
        except ValueError as error:
            raise SettingError(SETTING, reference, "a blueprint", f"{one_line(error)}.") from error
        sizes = sorted({(spec.channels, spec.size) for spec in slots})
        faults = [fault for size in sizes for fault in blueprint_findings(one, *size)]
        if faults:
            raise SettingError(
                SETTING,
                reference,
                "a blueprint that can stand in the slots",
                "; ".join(dict.fromkeys(faults)) + ".",
            )
        found.append(one)
    return found


def architecture_of(part: Part, name: str, code: int) -> Architecture:
    """What a function or class marked as a blueprint stands for; ValueError where that is none."""
    required = num_required(part)
    if required == 1:
        factory: Factory = part  # type: ignore[assignment]
        return Architecture(code, name, (OwnModule(factory),), residual=False)
    if required > 1:
        raise ValueError(
            f"blueprint {name}: it is called with the channels of a slot or with nothing, and "
            "wants more"
        )
    given = part()
    if isinstance(given, Architecture):
        return replace(given, code=code, name=name)
    if isinstance(given, nn.Module):
        raise ValueError(
            f"blueprint {name}: it gives a module, so it must be called with the channels of a slot"
        )
    if (
        not isinstance(given, tuple)
        or not given
        or not all(isinstance(one, PARTS) for one in given)
    ):
        kinds = ", ".join(kind.__name__ for kind in PARTS)
        raise ValueError(
            f"blueprint {name}: it gives {one_line(given)}, no tuple of parts ({kinds}) and no "
            "Architecture"
        )
    return Architecture(code, name, given)


def blueprint_findings(blueprint: Architecture, channels: int, size: int) -> list[str]:
    """What keeps seeds of the blueprint from a slot of these channels, height, width, in words."""
    if blueprint.module is not None:
        found = _module_findings(blueprint.module.make, channels, size)
        return [f"with {channels} channels of {size}x{size} pixels {fault}" for fault in found]
    return [] if seed_table(blueprint, channels).total else ["it has no parameters"]


def _module_findings(make: Factory, channels: int, size: int) -> list[str]:
    x = torch.zeros(2, channels, size, size)
    try:
        module = made(make, channels, PROBE_SEED)
        if not isinstance(module, nn.Module):
            return [f"it gives a {type(module).__name__}, not an nn.Module"]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = module(x.clone())
    except RAISED as error:
        return [f"it raises {type(error).__name__}: {one_line(error)}"]
    found = module_findings(module)
    buffers = [name for name, _ in module.named_buffers()]
    if buffers:
        found.append(f"it keeps buffers ({', '.join(buffers)}), which all networks would share")
    return [*found, *_output_findings(out, x)] or _together_findings(OwnModule(make), x)


def _together_findings(part: OwnModule, x: torch.Tensor) -> list[str]:
    """What the modules of two networks run into at once: x [B, C, H, W], of each."""
    channels = x.shape[1]
    try:
        rows = part.initial_rows(channels, torch.arange(2), x.dtype)
        with torch.no_grad():
            part.forward(
                Table(part.parameters(channels, channels)).unpack(rows), torch.cat([x, x], dim=1)
            )
    except RAISED as error:
        return [f"for several networks at once it raises {type(error).__name__}: {one_line(error)}"]
    return []


def module_findings(module: nn.Module) -> list[str]:
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
    kept = [
        name
        for part in module.modules()
        for name, one in vars(part).items()
        if isinstance(one, torch.Tensor)
    ]
    if kept:
        found.append(
            f"it keeps tensors that are no parameters or buffers ({', '.join(kept)}), which all "
            "networks would share"
        )
    return found


def _output_findings(out: object, x: torch.Tensor) -> list[str]:
    if not isinstance(out, torch.Tensor):
        return [f"it gives a {type(out).__name__}, not a tensor"]
    found = []
    if out.shape != x.shape:
        found.append(
            f"it gives features of shape {list(out.shape)} for features of shape {list(x.shape)}"
        )
    if out.dtype != x.dtype:
        found.append(f"it gives {out.dtype} for {x.dtype}")
    if out.device != x.device:
        found.append(f"it gives features on {out.device} for features on {x.device}")
    return found
