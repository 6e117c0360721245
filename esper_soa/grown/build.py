"""Descriptions and tensors of grown hosts, from which plain modules are built.

Given the shape of the hosts, their rows of weights, and what stands in their slots, `grown_hosts`
describes every host and gives its tensors the names that they have in a GrownNetwork
(model/modules.py). The parameter tables alone define the layout of rows.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.model.blueprints import GATE, gate_table, seed_layers, seed_table
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.modules import GrownNetwork, network_of
from esper_soa.nets.model.parts import Table
from esper_soa.nets.model.segments import PlainPart
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.vocabulary import BLEND_NAMES, STAGE_NAMES, Blend, Stage

# Stages of seeds that their host feels; a seed that blends at an alpha of 0 will be felt.
ACTIVE_STAGES_OF_HOST = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
# Buffer of a batch norm, which moves by a fixed share and does not read it.
BATCH_COUNTER = "num_batches_tracked"


class SlotContents(NamedTuple):
    """Contents of the S slots of a host."""

    stage: list[int]  # Stage
    blueprint: list[int]  # Blueprint
    blend: list[int]  # Blend
    alpha: list[float]  # [0, 1]


class GrownHost(NamedTuple):
    """A host by itself."""

    spec: dict  # see modules.GrownNetwork
    tensors: dict[str, Tensor]  # by name, on the CPU, each in memory of its own

    def network(self) -> GrownNetwork:
        """The host as a module, in eval mode."""
        return network_of(self.spec, self.tensors)


def plain_parts(shape: HostShape) -> list[PlainPart]:
    """The parts of a host with empty slots, in order."""
    return [part for segment in shape.segments for part in segment.plain_parts()]


def host_spec(shape: HostShape, inputs: dict, slot_contents: SlotContents) -> dict:
    """The description of a host: its input, its layers in order, and the seeds that affect its
    output, in forward order.
    """
    host = []
    places = {}
    for part in plain_parts(shape):
        residual = {"residual": True} if part.residual else {}
        layers = [layer._asdict() for layer in part.layers]
        host.append({"name": part.name, "layers": layers} | residual)
        places[part.slot] = part.name
    seeds = []
    for slot in shape.execution_order:
        if slot_contents.stage[slot] in ACTIVE_STAGES_OF_HOST:
            blueprint = shape.blueprint(slot_contents.blueprint[slot])
            channels = shape.slots[slot].channels
            gated = slot_contents.blend[slot] == Blend.GATE
            seed = {
                "slot": shape.slots[slot].name,
                "after": places[slot],
                "stage": STAGE_NAMES[slot_contents.stage[slot]],
                "blueprint": blueprint.name,
                "residual": blueprint.residual,
                "layers": [layer._asdict() for layer in seed_layers(blueprint, channels)],
                "blend": BLEND_NAMES[slot_contents.blend[slot]],
                "alpha": slot_contents.alpha[slot],
                "gate": GATE.layer("Squeeze", channels, 1, channels=channels)._asdict()
                if gated
                else None,
            }
            seeds.append(seed)
    return {
        "input": inputs,
        "classes": shape.num_classes,
        "host": host,
        "slots": [spec.name for spec in shape.slots],
        "seeds": seeds,
    }


def grown_hosts(
    shape: HostShape,
    weights: TensorDict,
    envs: Sequence[int],
    slot_contents: Sequence[SlotContents],
    inputs: Sequence[dict],
) -> list[GrownHost]:
    """The hosts of the env numbers `envs`, on the CPU; `slot_contents` of each.

    inputs: BatchSource.input_spec of the source of each. Raises ValueError for layers that are not
    those of the tables of parameters.
    """
    keys: list[tuple[str, ...]] = [("host", "params"), ("host", "statistics")]
    keys += [("seeds", slot.name, "params") for slot in shape.slots]
    indices = torch.tensor(list(envs), device=weights["host", "params"].device)
    rows = weights.select(*keys)[indices].cpu()
    nets = dict[tuple[tuple[int, ...], ...], GrownNetwork]()  # without numbers, of each kind
    hosts = []
    for place, env_slots in enumerate(slot_contents):
        spec = host_spec(shape, inputs[place], env_slots)
        kind = tuple(env_slots.stage), tuple(env_slots.blueprint), tuple(env_slots.blend)
        if kind not in nets:
            nets[kind] = _without_numbers(spec)
        hosts.append(_grown(spec, nets[kind], shape, rows=rows[place : place + 1]))
    return hosts


def live_parameters(
    shape: HostShape, weights: TensorDict, env: int, slot_contents: SlotContents, inputs: dict
) -> dict[str, Tensor]:
    """The parameters of a host and the seeds of `slot_contents`, as `grown_hosts` names them: views
    of the rows that are trained.
    """
    spec = host_spec(shape, inputs, slot_contents)
    return _parameters(spec, _without_numbers(spec), shape, rows=weights[env : env + 1])


def _without_numbers(spec: dict) -> GrownNetwork:
    with torch.device("meta"):
        return GrownNetwork(spec)


def _grown(spec: dict, net: GrownNetwork, shape: HostShape, rows: TensorDict) -> GrownHost:
    """The host in the single row of `rows`; net: a module on the meta device built like it."""
    tensors = {
        name: view.clone() for name, view in _parameters(spec, net, shape, rows=rows).items()
    }
    spec["parameters"] = sum(tensor.numel() for tensor in tensors.values())
    tensors |= _statistics(net, shape, rows["host", "statistics"])
    for seed in spec["seeds"]:
        tensors[f"{seed['slot']}.blend.alpha"] = torch.tensor(seed["alpha"])
    for name, buffer in net.get_submodule("input").named_buffers():
        tensors[f"input.{name}"] = torch.tensor(spec["input"][name]).view(buffer.shape)
    return GrownHost(spec, tensors)


def _parameters(
    spec: dict, net: GrownNetwork, shape: HostShape, rows: TensorDict
) -> dict[str, Tensor]:
    """Views of the parameters in the single row of `rows`, by the names of `net`."""
    modules = {part["name"]: net.get_submodule(part["name"]) for part in spec["host"]}
    parameters = (module.named_parameters(prefix=at) for at, module in modules.items())
    host = chain.from_iterable(parameters)
    tensors = _named(host, shape.parameters, rows["host", "params"])
    numbers = {slot.name: number for number, slot in enumerate(shape.slots)}
    blueprints = {blueprint.name: blueprint for blueprint in shape.blueprints}
    for seed in spec["seeds"]:
        number = numbers[seed["slot"]]
        channels = shape.slots[number].channels
        row = rows["seeds", seed["slot"], "params"]
        at = f"{seed['slot']}.seed"
        named = net.get_submodule(at).named_parameters(prefix=at)
        tensors |= _named(named, seed_table(blueprints[seed["blueprint"]], channels), row)
        if seed["gate"]:
            at = f"{seed['slot']}.blend.gate"
            named = net.get_submodule(at).named_parameters(prefix=at)
            tensors |= _named(named, gate_table(channels), row[:, row_layout(shape, number).seed :])
    return tensors


def _statistics(net: GrownNetwork, shape: HostShape, rows: Tensor) -> dict[str, Tensor]:
    """The buffers of a host by name, zero where rows of statistics do not hold them."""
    buffers = dict[str, Tensor]()
    recorded = list[tuple[str, Tensor]]()
    for part in plain_parts(shape):
        for name, buffer in net.get_submodule(part.name).named_buffers(prefix=part.name):
            buffers[name] = buffer
            if part.counts_batches or not name.endswith(BATCH_COUNTER):
                recorded.append((name, buffer))
    statistics = _named(recorded, shape.statistics, rows)
    return {
        name: statistics.get(name, torch.zeros(())).to(buffer.dtype, copy=True)
        for name, buffer in buffers.items()
    }


def _named(named: Iterable[tuple[str, Tensor]], table: Table, rows: Tensor) -> dict[str, Tensor]:
    """Views of the first columns of rows [1, ...] by the names of a module's tensors."""
    tensors = dict[str, Tensor]()
    for (name, like), values in zip(named, table.unpack(rows[:, : table.total]), strict=True):
        if like.shape != values.shape[1:]:
            layer = f"a layer that has one of {list(like.shape)}"
            raise ValueError(f"{name}: a parameter {list(values.shape[1:])} for {layer}")
        tensors[name] = values[0]
    return tensors
