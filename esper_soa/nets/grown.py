"""Hosts taken out of their pools, as plain modules: each with the seeds that take part in it.

Given the shape of the hosts, their rows of weights, and what stands in their slots, `grown_networks` describes every
host and fills a GrownNetwork (model/modules.py) of that description. The engines are not asked: rows mean what the
tables of parameters say. Called by ops/networks.py.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.host import Block, HostShape
from esper_soa.nets.model.blueprints import gate_layer, gate_table, seed_layers, seed_table
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.nets.model.parameters import Table
from esper_soa.nets.model.parts import Layer
from esper_soa.nets.pools import row_layout
from esper_soa.vocabulary import BLEND_NAMES, STAGE_NAMES, Blend, Stage

# A seed in training is not felt by its host; these are, one that blends at an alpha of 0 will be.
FELT_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


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


def host_spec(shape: HostShape, pixels: Pixels) -> dict:
    """The description of a host with empty slots: what goes in, and layers in order."""
    host = []
    for number, block in enumerate(shape.blocks):
        host.append({"name": f"block{number}", "layers": _plain(block.layers)})
        if block.pooled:
            host.append({"name": f"pool{number}", "layers": _plain([Layer("pool", "MaxPool2d", {"kernel_size": 2})])})
    sizes = {"in_features": shape.blocks[-1].channels, "out_features": shape.num_classes}
    last = [Layer("mean", "AdaptiveAvgPool2d", {"output_size": 1}), Layer("flatten", "Flatten", {}),
            Layer("linear", "Linear", dict(sizes))]  # fmt: skip
    host.append({"name": "classifier", "layers": _plain(last)})
    return {
        "input": {
            "shape": [IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE], "range": [0.0, 1.0], "channels": "RGB",
            "mean": list(pixels.mean), "std": list(pixels.std),
        },
        "classes": shape.num_classes, "host": host, "slots": [spec.name for spec in shape.slots], "seeds": [],
    }  # fmt: skip


def seed_specs(shape: HostShape, residents: Residents) -> list[dict]:
    """The descriptions of the seeds that a host feels, in the order in which images meet them."""
    places = {slot: name for number, block in enumerate(shape.blocks) for slot, name in _places(number, block)}
    return [
        _seed_spec(shape, slot, places[slot], residents)
        for slot in shape.execution_order
        if residents.stage[slot] in FELT_STAGES
    ]


def grown_networks(
    shape: HostShape, weights: TensorDict, envs: Sequence[int], residents: Sequence[Residents], pixels: Pixels
) -> Iterator[GrownNetwork]:
    """The hosts of the env numbers `envs` as networks in eval mode on the CPU, one at a time; `residents` of each.

    All rows are copied at once, before the first network is made. The process's random numbers stay as they are.
    """
    kept = [("host", "params"), ("host", "statistics"), *(("seeds", slot.name, "params") for slot in shape.slots)]
    rows = weights.select(*kept)[torch.tensor(list(envs), device=weights["host", "params"].device)].cpu()
    for place, mine in enumerate(residents):
        spec = host_spec(shape, pixels) | {"seeds": seed_specs(shape, mine)}
        with torch.random.fork_rng(devices=[]):
            net = GrownNetwork(spec)
        _fill_(net, shape, rows[place : place + 1])
        spec["parameters"] = sum(one.numel() for one in net.parameters())
        yield net.eval()


def _places(number: int, block: Block) -> list[tuple[int, str]]:
    """The slots of a block, each with the part of the host behind which it stands."""
    return [(block.slot_before_pool, f"block{number}"), (block.slot_after_pool, f"pool{number}")]


def _plain(layers: Sequence[Layer]) -> list[dict]:
    return [layer._asdict() for layer in layers]


def _seed_spec(shape: HostShape, slot: int, after: str, residents: Residents) -> dict:
    blueprint, channels = shape.blueprint(residents.blueprint[slot]), shape.slots[slot].channels
    gated = residents.blend[slot] == Blend.GATE
    return {
        "slot": shape.slots[slot].name, "after": after, "stage": STAGE_NAMES[residents.stage[slot]],
        "blueprint": blueprint.name, "residual": blueprint.residual,
        "layers": _plain(seed_layers(blueprint, channels)),
        "blend": BLEND_NAMES[residents.blend[slot]], "alpha": residents.alpha[slot],
        "gate": gate_layer(channels)._asdict() if gated else None,
    }  # fmt: skip


@torch.no_grad()
def _fill_(net: GrownNetwork, shape: HostShape, rows: TensorDict) -> None:
    """Give `net` the weights of the one host in `rows`."""
    host = [module for part in net.spec["host"] for module in net.get_submodule(part["name"]).children()]
    _copy_(_parameters(host), shape.parameters, rows["host", "params"])
    norms = [module for module in host if isinstance(module, nn.BatchNorm2d)]
    _copy_([kept for norm in norms for kept in (norm.running_mean, norm.running_var)], shape.statistics,
           rows["host", "statistics"])  # fmt: skip
    names = [spec.name for spec in shape.slots]
    for seed in net.spec["seeds"]:
        slot = names.index(seed["slot"])
        blueprint = next(one for one in shape.blueprints if one.name == seed["blueprint"])
        own, layout = rows["seeds", seed["slot"], "params"], row_layout(shape, slot)
        table, place = seed_table(blueprint, shape.slots[slot].channels), net.get_submodule(seed["slot"])
        _copy_(_parameters([place.get_submodule("seed")]), table, own[:, : table.total])
        if seed["gate"]:
            table = gate_table(shape.slots[slot].channels)
            _copy_(_parameters([place.get_submodule("blend.gate")]), table, own[:, layout.seed :][:, : table.total])


def _parameters(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [parameter for module in modules for parameter in module.parameters()]


def _copy_(targets: Sequence[Tensor | None], table: Table, rows: Tensor) -> None:
    """Rows [1, total] into the tensors that they are of; raises ValueError where a layer is not what its part says."""
    for target, values in zip(targets, table.unpack(rows), strict=True):
        if target is None or target.shape != values.shape[1:]:
            raise ValueError(f"a parameter {list(values.shape[1:])} for a layer that has none of this shape")
        target.copy_(values[0])
