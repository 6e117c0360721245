"""Hosts of users' modules are traced to operations, and the native kernels compute what torch does
in double precision.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig
from esper_soa.env.world import World
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.cpu.host_program import host_obstacle, host_program
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Stage
from tests.builders.tiny_world import CPU, seeds_where, tiny_settings
from tests.builders.user_files import arrays, write
from tests.nets.engines.cpu.test_engine import (
    NOTHING,
    NUM_ENVS,
    ONE_SIDE,
    active_seeds_of,
    equals_torch,
    played,
)

HERE = "hosts_of_operations"
SLOTS = {
    "resnet": ["r0c0", "r0c1", "r0c2"],
    "vgg": ["r0c0", "r0c2"],
    "separable": ["r0c1", "r0c2"],
    "identity": ["r0c0", "r0c1", "r0c2", "r0c3"],
    "mixed": ["r0c0", "r0c1"],
    "mixer": ["r0c0", "r0c1", "r0c2"],
    "moved": ["r0c0", "r0c1"],
    "attending": ["r0c0", "r0c1"],
}
SYNTHETIC = DataConfig(name="synthetic", synthetic_train=80, synthetic_test=41)
SEEDS = ("weighted", "beside", "tokens", "attended")


def shape_of(name: str) -> HostShape:
    return task_shape(TaskConfig(name="own", host=f"{HERE}:{name}"), SLOTS.get(name, ["r0c0"]))


def made(
    name: str,
    optimizer: str = "sgd",
    blueprints: tuple[str, ...] = (),
    data: DataConfig = SYNTHETIC,
) -> World:
    """Hosts with weights as they begin, two batches."""
    task = TaskConfig(name="own", host=name, optimizer=optimizer)
    task.blueprints = [f"{HERE}:{each}" for each in blueprints] or task.blueprints
    settings = replace(
        tiny_settings(NUM_ENVS, 1, 4),
        batch_size=6,
        train_samples=12,
        val_samples=7,
        task=task,
        slots=SLOTS.get(name.removeprefix(f"{HERE}:"), ["r0c0", "r0c2"]),
        data=data,
        compute=ComputeConfig(workers=2, env_chunk=2),
    )
    world = build_world(settings, CPU)
    world.start_round(0)
    g = torch.Generator().manual_seed(3)
    momentum = world.weights["host", "momentum"]
    momentum.copy_(0.02 * torch.randn(momentum.shape, generator=g).abs())
    for pool in world.weights["seeds"].values():
        pool["params"].copy_(0.2 * torch.randn(pool["params"].shape, generator=g))
    return world


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", SLOTS)
def test_hosts_of_modules_with_seeds_equal_torch(name: str) -> None:
    world = made(f"{HERE}:{name}")
    assert isinstance(world.rules.engine, CpuEngine), world.rules.engine.chosen.reason
    seeds = active_seeds_of(38, len(SLOTS[name]))
    ours = played(world, seeds)
    assert not torch.equal(ours.weights["host", "params"], world.weights["host", "params"])
    equals_torch(world, seeds, nothing=NOTHING, share=ONE_SIDE)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("host", ["chain", f"{HERE}:grey"])
def test_hosts_of_grey_images_equal_torch(host: str, tmp_path: Path) -> None:
    root = str(write(tmp_path / "grey.npz", arrays(classes=10)))
    world = made(host, data=DataConfig("npz", root, size=28, channels=1))
    assert isinstance(world.rules.engine, CpuEngine), world.rules.engine.chosen.reason
    equals_torch(world, active_seeds_of(38, 2), nothing=NOTHING, share=ONE_SIDE)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING])
def test_seeds_that_are_modules_equal_torch(optimizer: str, stage: int) -> None:
    world = made(f"{HERE}:resnet", optimizer, blueprints=SEEDS)
    assert isinstance(world.rules.engine, CpuEngine), world.rules.engine.chosen.reason
    kinds = np.array([[13, 14, 15], [14, 15, 16], [16, 13, 14]] * 2)
    blends = np.array([[Blend.ADD, Blend.MULTIPLY, Blend.GATE]])
    seeds = seeds_where(np.ones_like(kinds, dtype=bool), stage, kinds, blends)
    equals_torch(world, seeds, nothing=NOTHING, share=ONE_SIDE)


def test_a_residual_block_with_a_stride_is_four_operations() -> None:
    program = host_program(shape_of("resnet"))
    columns = ["first", "second", "outputs", "width", "kernel", "stride", "activation", "after"]
    assert [tuple(row[columns]) for row in program[3:-1]] == [
        (2, -1, 20, 16, 3, 2, 0, -1),
        (2, -1, 20, 16, 1, 2, 1, -1),
        (3, 4, 20, 16, 3, 1, 0, 2),
    ]
    assert program["second"][2] == 0
    assert program["weight"][-1] == shape_of("resnet").parameters.total - 210


def test_a_bias_a_relu_and_a_pool_are_one_operation() -> None:
    program = host_program(shape_of("vgg"))
    assert program["pooled"].tolist() == [1, 1, 1, 0]
    assert program["scale"].tolist() == [-1] * 4
    assert program["shift"].tolist() == [162, 168 + 864, 168 + 880 + 2880, 3928 + 220]


def test_what_the_kernels_do_not_have_is_named_with_its_line() -> None:
    assert "cumsum in forward, users/hosts_of_operations.py:" in host_obstacle(shape_of("sums"))


def test_what_takes_part_in_nothing_goes_to_torch() -> None:
    assert "tensors that take part in nothing" in host_obstacle(shape_of("idle"))


def test_a_module_that_computes_something_else_in_training_runs_in_torch() -> None:
    assert "Doubled, which does otherwise in eval mode" in host_obstacle(shape_of("doubled"))
