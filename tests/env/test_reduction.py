"""A process with some of the envs of a run: it needs a reduction, and no process group."""

from dataclasses import replace

import pytest
import torch

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.env.env import Env
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.env.world import World
from esper_soa.training.loop.build import build_world
from tests.builders.tiny_world import CPU, tiny_settings

ENVS = 4
FIRST = 2
STEPS = 4


class Rest(Reduction):
    """That of the process with the envs from FIRST on."""

    count = 2
    first_env = FIRST

    def all_envs(self, num_here: int) -> int:
        return ENVS

    def rows_here(self, entries: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return entries[FIRST:]


def losses(world: World) -> torch.Tensor:
    """float64 [T, N] of an episode of random play."""
    env = Env(world)
    agent = RandomPolicy()
    observed = env.reset(1)
    found = []
    while observed is not None:
        found.append(observed.view.state.signals.val_loss)
        _, observed = env.step(agent.act(observed.view, ())[0].action)
    return torch.stack(found)


@pytest.mark.parametrize("split", [False, True])
def test_the_envs_of_a_process_are_those_of_the_run_by_their_numbers(split: bool) -> None:
    cfg = tiny_settings(ENVS, 2, STEPS)
    cfg.data.split = split
    whole = build_world(cfg, CPU)
    cfg = replace(cfg, envs=ENVS - FIRST)
    part = build_world(cfg, CPU)
    rest = World(part.rules, part.data, cfg.seed, reduction=Rest())
    expected = losses(whole)
    assert torch.equal(losses(rest), expected[:, FIRST:])
    assert not torch.equal(losses(part), expected[:, FIRST:])


def test_the_reduction_over_all_envs_gives_back_what_it_gets() -> None:
    numbers = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for given in (
        ALL_ENVS.rows_here(numbers),
        *ALL_ENVS.total(numbers),
        *ALL_ENVS.all_gather(numbers),
    ):
        assert given is numbers
    assert ALL_ENVS.all_envs(ENVS) == ENVS
    assert ALL_ENVS.gather([numbers], dim=1) == [numbers]
