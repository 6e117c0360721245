"""An env as users call it: what it refuses, and what it tells. Its episodes: test_simulator.py."""

import pytest
import torch

from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.config.env import RewardConfig
from esper_soa.env.env import Env
from esper_soa.env.step import EAGER, EnvView
from esper_soa.nets.graphs import CapturedCall, StepCache
from esper_soa.state import EnvState
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Op
from tests.builders.tiny_world import CPU, tiny_settings


@pytest.fixture
def env() -> Env:
    return Env(build_world(tiny_settings(3, 2, 6), CPU))


def test_an_action_needs_something_that_was_observed(env: Env) -> None:
    assert (env.step_number, env.over) == (0, False)
    view = env.reset().view
    assert (env.world.round, view.batch_size) == (0, (3,))
    wait = WaitPolicy().act(view, ())[0].action
    env.apply_action_(wait)
    told = "nothing has been observed since the last action: call reset, or observe_, first"
    with pytest.raises(RuntimeError, match=f"^{told}$"):
        env.step(wait)
    env.reset()
    env.begin_(0)
    with pytest.raises(RuntimeError, match=f"^{told}$"):
        env.apply_action_(wait)


def test_steps_that_are_kept_compute_what_calls_do() -> None:
    played: list[EnvState] = []
    for steps in (None, StepCache[CapturedCall](capture=False)):
        cfg = tiny_settings(3, 2, 3, RewardConfig(rent_weight="[0.5,2]"))
        world = build_world(cfg, CPU)
        world.kernels = EAGER._replace(steps=steps)
        env = Env(world)
        agent = RandomPolicy()
        for number in range(2):
            observed: EnvView | None = env.reset(number)
            while observed is not None:
                _, observed = env.step(agent.act(observed.view, ())[0].action)
                played.append(env.state)
    half = len(played) // 2
    assert half == 6
    for one, other in zip(played[:half], played[half:], strict=True):
        assert (one == other).all()


def test_what_was_chosen_last_is_told_though_the_slot_does_not_allow_it(env: Env) -> None:
    wait = WaitPolicy().act(env.reset().view, ())[0].action
    result, _ = env.step(wait.replace(op=torch.full_like(wait.op, Op.PRUNE)))
    assert result.state.signals.last_op.tolist() == [Op.PRUNE] * 3
    assert not result.state.signals.last_success.any()
