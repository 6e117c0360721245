"""What data sets are, what envs draw of them, and what networks are made of, as it was recorded."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import DataConfig, TaskConfig, TransformerConfig, host_slots
from esper_soa.grown.build import plain_parts
from esper_soa.nets.data import datasets
from esper_soa.nets.model.blueprints import (
    BLUEPRINTS,
    GATE,
    SEQUENCE_BLUEPRINTS,
    gate_table,
    seed_layers,
    seed_table,
)
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import activation_elements, host_shape, initial_hosts
from esper_soa.nets.model.parts import LayerSpec
from esper_soa.nets.model.user_parts import task_host, task_slots
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import parameter_table
from esper_soa.state import Costs
from esper_soa.system import streams
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.recorded_numbers import assert_recorded, assert_recorded_text, fingerprints
from tests.builders.tiny_world import CPU, seeds_where

ENVS = torch.arange(3)
SETS = {
    "fashion32": DataConfig("fashion32", validation_images=40),
    "synthetic": DataConfig("synthetic", synthetic_train=60, synthetic_test=20),
    "text": DataConfig("text", context=8),
}
CHAIN = TaskConfig(base_channels=4, num_blocks=3, num_pools=2)
SIZES = TransformerConfig(width=16, layers=2, heads=2, context=8, segments=2, dropout=0.1)
HOSTS = {"chain": CHAIN, "transformer": TaskConfig(host="transformer", transformer=SIZES)}


def test_data_sets_are_those_recorded() -> None:
    lines = [
        f"CIFAR-10: {datasets.CIFAR10_IMAGES}, {datasets.CIFAR10_MEAN}, {datasets.CIFAR10_STD}"
    ]
    for name, cfg in SETS.items():
        found = datasets.load_samples(cfg, CPU)
        facts = found.facts() | {"input": found.input_spec(), "spec": found.spec._replace(cuts=())}
        # sums of floats, which round by machine
        left_out = ("mean", "std", "input") if name == "synthetic" else ()
        lines += [f"{name}: {key} = {facts[key]}" for key in facts if key not in left_out]
    assert_recorded_text("data_sets", "\n".join(lines))


def keys(purpose: int) -> Tensor:
    return streams.stream_keys(7, purpose, (2,), ENVS)


def tensors(table: Costs) -> dict[str, Tensor]:
    return {name: torch.as_tensor(part) for name, part in table._asdict().items()}


def test_networks_are_made_of_what_was_recorded() -> None:
    found = {}
    for name, task in HOSTS.items():
        blueprints = SEQUENCE_BLUEPRINTS if name == "transformer" else BLUEPRINTS
        shape = host_shape(task, host_slots(task), blueprints)
        rows, statistics = initial_hosts(shape, keys(streams.HOST_INIT), torch.float64)
        weights = pools.allocate(shape, 3, CPU, torch.float64, "adamw")
        blends = np.array([[Blend.ADD], [Blend.MULTIPLY], [Blend.GATE]])
        every = np.ones((3, len(shape.slots)), dtype=bool)
        born = seeds_where(every, Stage.GERMINATED, Blueprint.ATTENTION, blends, newborn=every)
        pools.claim_(weights, shape, pools.claims_of(shape, born), keys(streams.SEED_INIT))
        sizes = shape.parameters.total, shape.products, activation_elements(shape, 99, 4)
        found[name] = {
            "sizes": torch.tensor(sizes),
            "segments": torch.tensor([[one.products, one.activations] for one in shape.segments]),
            "parameters": rows,
            "statistics": statistics,
            "born": {name: pool["params"] for name, pool in weights["seeds"].items()},
            "counts": tensors(parameter_table(shape, CPU)),
            "flop": tensors(training_flop(shape, CPU)),
            "slots": torch.tensor([[s.row, s.block, *s.shape, s.depth] for s in shape.slots]),
        }
    assert_recorded("networks", fingerprints(found))


def words(layers: Iterable[LayerSpec]) -> str:
    every = (f"{one.name} {one.kind} {one.arguments}" for one in layers)
    return "; ".join(every).translate({ord(sign): None for sign in "{}':,"})


def test_networks_by_themselves_have_the_layers_that_were_recorded() -> None:
    """By their names, which those of the weights in a file begin with; and how seeds begin."""
    own = {name: TaskConfig(host=f"hosts_of_users:{name}") for name in ("refined", "staged")}
    lines = []
    for name, task in (HOSTS | own).items():
        slots = task_slots(task, ["r0c0", "r0c1"])
        blueprints = SEQUENCE_BLUEPRINTS if name == "transformer" else BLUEPRINTS
        shape = host_shape(task, slots, blueprints, task_host(task))
        for part in plain_parts(shape):
            facts = f"slot {part.slot} {part.residual} {part.counts_batches}"
            lines.append(f"{name} {part.name} {facts} | {words(part.layers)}")
    for one in BLUEPRINTS + SEQUENCE_BLUEPRINTS:
        starts = [list(parameter) for parameter in seed_table(one, 16).parameters]
        lines.append(f"{one.code} {one.name} | {words(seed_layers(one, 16))} | {starts}")
    starts = [list(parameter) for parameter in gate_table(16).parameters]
    lines.append(f"gate | {words([GATE.layer('Squeeze', 16, 1, 16)])} | {starts}")
    assert_recorded_text("layers", "\n".join(lines))
