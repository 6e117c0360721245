"""The learning rates of an env-step: constant, or along half a cosine, on every way through the
networks.
"""

import math
from dataclasses import replace

import pytest
import torch

from esper_soa.config.nets import TaskConfig, lr_factor
from esper_soa.env.step import measure_
from esper_soa.env.world import World
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.env_records import with_values
from tests.builders.tiny_world import tiny_settings

CPU = torch.device("cpu")
STEPS = 6


def world_of(task: TaskConfig, plain: bool = False) -> World:
    """Two hosts of `task` with two slots; plain: in torch."""
    cfg = tiny_settings(2, 2, STEPS)
    world = build_world(replace(cfg, task=task), CPU)
    if plain:
        world.rules = world.rules._replace(engine=TorchEngine())
    return world


def trained(world: World, steps: list[int]) -> dict[str, torch.Tensor]:
    """Weights after the env-steps `steps` with a seed that trains behind slot 0 and one that takes
    part in slot 1.
    """
    state = world.start_round(0)
    stages = [[Stage.TRAINING, Stage.FOSSILIZED]] * 2
    codes = {"blueprint": Blueprint.CONV_LIGHT, "blend": Blend.ADD}
    born = {"newborn": True, "fresh_momentum": True, "alpha": [[0.0, 1.0]] * 2}
    state = state.replace(slots=with_values(state.slots, stage=stages, **codes, **born))
    for step in steps:
        state, _ = measure_(world.rules, world.weights, state, world.work(step))
    rows = world.weights.select("host", "seeds").clone().flatten_keys(".").items()
    return {name: one for name, one in rows if name.endswith("params")}


def test_a_cosine_goes_from_all_to_nearly_nothing_and_constant_stays() -> None:
    assert [lr_factor("constant", step, 4) for step in range(4)] == [1.0] * 4
    halves = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [lr_factor("cosine", step, 4) for step in range(4)] == pytest.approx(halves)


@pytest.mark.parametrize(("channels", "plain"), [(2, False), (8, True)])  # in C, and in torch
def test_a_later_env_step_trains_with_the_rates_of_its_place(channels: int, plain: bool) -> None:
    task = TaskConfig(base_channels=channels, num_blocks=2, num_pools=2, host_lr=0.2, seed_lr=0.1)
    factor = lr_factor("cosine", 4, STEPS)
    found = trained(world_of(replace(task, lr_schedule="cosine"), plain), [4])
    lower = replace(task, host_lr=0.2 * factor, seed_lr=0.1 * factor)
    wanted = trained(world_of(lower), [4])
    full = trained(world_of(task), [4])
    for name, params in wanted.items():
        torch.testing.assert_close(found[name], params, rtol=0, atol=2e-6)
        assert (params - full[name]).abs().max() > 1e-4  # the factor counts here
