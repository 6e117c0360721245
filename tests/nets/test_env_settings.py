"""Settings of the optimiser by env: env i of N is a run of one env with its own, to the bit."""

from dataclasses import replace

import pytest
import torch

from esper_soa.config.nets import TaskConfig
from esper_soa.env.step import measure_
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.env_records import with_values
from tests.builders.tiny_world import tiny_settings

CPU = torch.device("cpu")
ENVS = 5  # more than values
VALUES = {
    "host_lr": (0.3, 0.1, 0.02),
    "seed_lr": (0.3, 0.1, 0.02),
    "momentum": (0.5, 0.9, 0.0),
    "weight_decay": (0.1, 0.0, 0.03),
    "max_grad_norm": (0.01, 0.0, 0.3),
}


def trained(task: TaskConfig, plain: bool) -> dict[str, torch.Tensor]:
    """Weights after two env-steps with a seed that trains and one that takes part; plain: torch."""
    cfg = tiny_settings(ENVS, 2, 4)
    world = build_world(replace(cfg, task=task), CPU)
    if plain:
        world.rules = world.rules._replace(engine=TorchEngine())
    state = world.start_round(0)
    stages = [[Stage.TRAINING, Stage.FOSSILIZED]] * ENVS
    codes = {"blueprint": Blueprint.CONV_LIGHT, "blend": Blend.ADD}
    born = {"newborn": True, "fresh_momentum": True, "alpha": [[0.0, 1.0]] * ENVS}
    # the middle env has one seed alone, so rows of seeds are not those of envs
    stages[2] = [Stage.TRAINING, Stage.EMPTY]
    state = state.replace(slots=with_values(state.slots, stage=stages, **codes, **born))
    for step in range(2):
        state, _ = measure_(world.rules, world.weights, state, world.work(step))
    return dict(world.weights.select("host", "seeds").clone().flatten_keys(".").items())


def base(optimizer: str = "sgd") -> TaskConfig:
    return TaskConfig(
        base_channels=2, num_blocks=2, num_pools=2, max_grad_norm=0.05, optimizer=optimizer
    )


@pytest.mark.parametrize("plain", [False, True])  # in C, and in torch
@pytest.mark.parametrize("name", VALUES)
def test_an_env_with_its_own_setting_is_the_env_of_a_run_with_it(name: str, plain: bool) -> None:
    values = VALUES[name]
    mixed = trained(replace(base(), **{name: str(list(values))}), plain)
    alone = [trained(replace(base(), **{name: value}), plain) for value in values]
    for key, rows in mixed.items():
        wanted = torch.stack([alone[env % len(values)][key][env] for env in range(ENVS)])
        assert torch.equal(rows, wanted), key
    assert any(not torch.equal(alone[0][key], alone[1][key]) for key in mixed)  # it matters here


@pytest.mark.parametrize("name", [one for one in VALUES if one != "momentum"])
def test_adamw_heeds_settings_of_envs(name: str) -> None:
    values = VALUES[name]
    mixed = trained(replace(base("adamw"), **{name: str(list(values))}), True)
    alone = [trained(replace(base("adamw"), **{name: value}), True) for value in values]
    for key, rows in mixed.items():
        wanted = torch.stack([alone[env % len(values)][key][env] for env in range(ENVS)])
        assert torch.equal(rows, wanted), key


@pytest.mark.parametrize("plain", [False, True])
def test_a_list_of_equal_values_is_the_number(plain: bool) -> None:
    lists = {name: str([vars(base())[name]] * 2) for name in VALUES}
    mixed = trained(replace(base(), **lists), plain)
    for key, rows in trained(base(), plain).items():
        assert torch.equal(rows, mixed[key]), key
