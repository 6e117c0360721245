"""An env as users call it: what it refuses, and what it tells. Its episodes: test_simulator.py."""

import pytest
import torch
from tiny_world import CPU, tiny_settings

from esper_soa.agent.scripted import WaitPolicy
from esper_soa.env.env import Env
from esper_soa.training.build import build_world
from esper_soa.vocabulary import Op


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


def test_what_was_chosen_last_is_told_though_the_slot_does_not_allow_it(env: Env) -> None:
    wait = WaitPolicy().act(env.reset().view, ())[0].action
    result, _ = env.step(wait.replace(op=torch.full_like(wait.op, Op.PRUNE)))
    assert result.state.signals.last_op.tolist() == [Op.PRUNE] * 3
    assert not result.state.signals.last_success.any()
