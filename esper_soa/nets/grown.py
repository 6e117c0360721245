"""Hosts taken out of their pools, as what plain modules are made from, with seeds that take part.

Given the shape of the hosts, their rows of weights, and what stands in their slots, `grown_hosts`
describes every host and gives its tensors the names that they have in a GrownNetwork
(model/modules.py). The engines are not asked: rows mean what the tables of parameters say. Called
by ops/networks.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.host import Block, HostShape, OwnSegment, Refinement, Segment, slots_of
from esper_soa.nets.model.blueprints import gate_layer, gate_table, seed_layers, seed_table
from esper_soa.nets.model.modules import GrownNetwork, network_of
from esper_soa.nets.model.parameters import Table
from esper_soa.nets.model.parts import Layer
from esper_soa.nets.pools import row_layout
from esper_soa.vocabulary import BLEND_NAMES, STAGE_NAMES, Blend, Stage

# A seed in training is not felt by its host; these are, one that blends at an alpha of 0 will be.
FELT_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
# of a batch norm, which moves by a fixed share and does not read it
COUNTER = "num_batches_tracked"


class Residents(NamedTuple):
    """What stands in the S slots of a host."""

    stage: list[int]  # Stage
    blueprint: list[int]  # Blueprint
    blend: list[int]  # Blend
    alpha: list[float]  # [0, 1]


class Pixels(NamedTuple):
    """How images are normalised: mean and standard deviation per channel, of values in [0, 1]."""

    mean: Sequence[float]
    std: Sequence[float]


class Grown(NamedTuple):
    """A host by itself."""

    spec: dict  # see modules.GrownNetwork
    tensors: dict[str, Tensor]  # by name, on the CPU, each in memory of its own

    def network(self) -> GrownNetwork:
        """As a module, in eval mode."""
        return network_of(self.spec, self.tensors)


class _Names(NamedTuple):
    """Tensors of hosts that are built alike, in the order of rows: parameters by name and shape."""

    host: list[tuple[str, torch.Size]]
    statistics: list[tuple[str, torch.Size]]
    counters: list[str]  # of the host, that nothing reads and rows do not hold
    seeds: dict[str, list[tuple[str, torch.Size]]]  # by slot
    gates: dict[str, list[tuple[str, torch.Size]]]


def host_spec(shape: HostShape, pixels: Pixels) -> dict:
    """The description of a host with empty slots: what goes in, and layers in order."""
    host = []
    for number, block in enumerate(shape.segments):
        residual = {"residual": True} if isinstance(block, Refinement) else {}
        host.append({"name": _name(number, block), "layers": _plain(block.layers)} | residual)
        if isinstance(block, Block) and block.pooled:
            pool = [Layer("pool", "MaxPool2d", {"kernel_size": 2})]
            host.append({"name": f"pool{number}", "layers": _plain(pool)})
    sizes = {"in_features": shape.classifier_inputs, "out_features": shape.num_classes}
    last = [
        Layer("mean", "AdaptiveAvgPool2d", {"output_size": 1}),
        Layer("flatten", "Flatten", {}),
        Layer("linear", "Linear", dict(sizes)),
    ]
    host += [{"name": "classifier", "layers": _plain(last)}] if shape.head is None else []
    return {
        "input": {
            "shape": [IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE],
            "range": [0.0, 1.0],
            "channels": "RGB",
            "mean": list(pixels.mean),
            "std": list(pixels.std),
        },
        "classes": shape.num_classes,
        "host": host,
        "slots": [spec.name for spec in shape.slots],
        "seeds": [],
    }


def seed_specs(shape: HostShape, residents: Residents) -> list[dict]:
    """The descriptions of the seeds that a host feels, in the order in which images meet them."""
    places = {
        slot: name
        for number, block in enumerate(shape.blocks)
        for slot, name in _places(number, block)
    }
    return [
        _seed_spec(shape, slot, places[slot], residents)
        for slot in shape.execution_order
        if residents.stage[slot] in FELT_STAGES
    ]


def grown_hosts(
    shape: HostShape,
    weights: TensorDict,
    envs: Sequence[int],
    residents: Sequence[Residents],
    pixels: Pixels,
) -> list[Grown]:
    """The hosts of the env numbers `envs`, on the CPU; `residents` of each. Raises ValueError for
    layers that are not what the tables of parameters say.
    """
    kept: list[tuple[str, ...]] = [("host", "params"), ("host", "statistics")]
    kept += [("seeds", slot.name, "params") for slot in shape.slots]
    chosen = torch.tensor(list(envs), device=weights["host", "params"].device)
    rows = weights.select(*kept)[chosen].cpu()
    names = dict[tuple[tuple[int, ...], ...], _Names]()
    hosts = []
    for place, mine in enumerate(residents):
        spec = host_spec(shape, pixels) | {"seeds": seed_specs(shape, mine)}
        kind = tuple(mine.stage), tuple(mine.blueprint), tuple(mine.blend)
        if kind not in names:
            names[kind] = _names(spec, shape.own_chain is not None)
        hosts.append(_grown(spec, names[kind], shape, rows[place : place + 1]))
    return hosts


def _name(number: int, segment: Segment) -> str:
    """What a segment is called: a module of a user's own as it was there."""
    return segment.facts.name if isinstance(segment, OwnSegment) else f"block{number}"


def _places(number: int, segment: Segment) -> list[tuple[int, str]]:
    """The slots of a segment, each with the part of the host behind which it stands."""
    return list(zip(slots_of(segment), (_name(number, segment), f"pool{number}"), strict=False))


def _plain(layers: Sequence[Layer]) -> list[dict]:
    return [layer._asdict() for layer in layers]


def _seed_spec(shape: HostShape, slot: int, after: str, residents: Residents) -> dict:
    blueprint = shape.blueprint(residents.blueprint[slot])
    channels = shape.slots[slot].channels
    gated = residents.blend[slot] == Blend.GATE
    return {
        "slot": shape.slots[slot].name,
        "after": after,
        "stage": STAGE_NAMES[residents.stage[slot]],
        "blueprint": blueprint.name,
        "residual": blueprint.residual,
        "layers": _plain(seed_layers(blueprint, channels)),
        "blend": BLEND_NAMES[residents.blend[slot]],
        "alpha": residents.alpha[slot],
        "gate": gate_layer(channels)._asdict() if gated else None,
    }


def _names(spec: dict, own: bool) -> _Names:
    """The names of the tensors in the network of `spec`; own: rows hold all buffers of its host."""
    with torch.device("meta"):
        net = GrownNetwork(spec)
    host = list[tuple[str, torch.Size]]()
    statistics = list[tuple[str, torch.Size]]()
    counters = list[str]()
    for part in spec["host"]:
        host += _parameters(net, part["name"])
        for name, buffer in net.get_submodule(part["name"]).named_buffers(prefix=part["name"]):
            if own or not name.endswith(COUNTER):
                statistics.append((name, buffer.shape))
            else:
                counters.append(name)
    slots = [seed["slot"] for seed in spec["seeds"]]
    gated = [seed["slot"] for seed in spec["seeds"] if seed["gate"]]
    seeds = {slot: _parameters(net, f"{slot}.seed") for slot in slots}
    gates = {slot: _parameters(net, f"{slot}.blend.gate") for slot in gated}
    return _Names(host, statistics, counters, seeds, gates)


def _parameters(net: GrownNetwork, place: str) -> list[tuple[str, torch.Size]]:
    """Names and shapes of the parameters of the module that is called `place`, in order."""
    named = net.get_submodule(place).named_parameters(prefix=place)
    return [(name, one.shape) for name, one in named]


def _grown(spec: dict, names: _Names, shape: HostShape, rows: TensorDict) -> Grown:
    """The one host in `rows`."""
    tensors = _named(names.host, shape.parameters, rows["host", "params"])
    slots = {slot.name: (number, slot.channels) for number, slot in enumerate(shape.slots)}
    codes = {one.name: one for one in shape.blueprints}
    for seed in spec["seeds"]:
        name = seed["slot"]
        own = rows["seeds", seed["slot"], "params"]
        number, channels = slots[name]
        tensors |= _named(names.seeds[name], seed_table(codes[seed["blueprint"]], channels), own)
        if name in names.gates:
            gates = own[:, row_layout(shape, number).seed :]
            tensors |= _named(names.gates[name], gate_table(channels), gates)
    spec["parameters"] = sum(one.numel() for one in tensors.values())
    tensors |= _named(names.statistics, shape.statistics, rows["host", "statistics"])
    if shape.own_chain is not None:
        kept = [buffer.dtype for segment in shape.own_chain.segments for buffer in segment.buffers]
        for (name, _), dtype in zip(names.statistics, kept, strict=True):
            tensors[name] = tensors[name].to(dtype)
    tensors |= {name: torch.zeros((), dtype=torch.int64) for name in names.counters}
    for seed in spec["seeds"]:
        tensors[f"{seed['slot']}.blend.alpha"] = torch.tensor(seed["alpha"])
    for name in ("mean", "std"):
        tensors[f"input.{name}"] = torch.tensor(spec["input"][name]).view(-1, 1, 1)
    return Grown(spec, tensors)


def _named(
    names: Sequence[tuple[str, torch.Size]], table: Table, rows: Tensor
) -> dict[str, Tensor]:
    """The tensors in the first columns of rows [1, ...] by their names."""
    named = dict[str, Tensor]()
    for (name, wanted), values in zip(names, table.unpack(rows[:, : table.total]), strict=True):
        if wanted != values.shape[1:]:
            told = (
                f"a parameter {list(values.shape[1:])} for a layer that has one of {list(wanted)}"
            )
            raise ValueError(f"{name}: {told}")
        named[name] = values[0].clone()
    return named
