"""An env as users call it: reset and step give what an episode of the trainer gives, to the bit."""

import pytest
import torch
from tiny_world import CPU, quiet_progress, tiny_settings

from esper_soa.agent.protocol import restart
from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.env.env import Env
from esper_soa.env.world import World
from esper_soa.training.build import build_world
from esper_soa.training.collect import EpisodeRunner, Player, Round
from esper_soa.vocabulary import Op

ENVS = 3
SLOTS = 2
STEPS = 6
NUMBER = 2


def world() -> World:
    return build_world(tiny_settings(ENVS, SLOTS, STEPS), CPU)


def test_steps_of_an_env_are_the_episode_of_the_trainer_to_the_bit() -> None:
    played = world()
    own = world()
    episode = EpisodeRunner(
        played,
        Player(RandomPolicy(), None),
        Round(NUMBER, quiet_progress()),
    )
    agent = RandomPolicy()
    env = Env(own)
    fresh = memory = agent.start(ENVS, CPU)
    seen = env.reset(NUMBER)
    decided = 0
    while seen is not None:
        decision, memory = agent.act(seen.view, restart(memory, fresh, seen.restarted))
        result, seen = env.step(decision.action)
        episode.step_()
        decided += 1
        assert torch.equal(result.terms.total.nan_to_num(), result.terms.total)
        assert (result.state == episode.env.state).all()
    assert decided == STEPS
    assert env.over
    assert (own.weights == played.weights).all()
    assert env.state.totals.germinated.sum() > 0


def test_a_round_is_the_same_whatever_was_played_before_it_and_another_one_is_not() -> None:
    env = Env(world())
    first = env.reset(NUMBER).measured
    env.step(WaitPolicy().act(env.current_view(), ())[0].action)
    again = env.reset(NUMBER).measured
    other = env.reset(NUMBER + 1).measured
    assert (first == again).all()
    assert not torch.equal(first.train_loss, other.train_loss)


def test_an_action_needs_something_that_was_observed() -> None:
    env = Env(world())
    wait = WaitPolicy().act(env.reset().view, ())[0].action
    env.apply_action_(wait)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(wait)
    env.begin_(0)
    with pytest.raises(RuntimeError, match="call reset"):
        env.apply_action_(wait)


def test_what_was_chosen_last_is_told_though_the_slot_does_not_allow_it() -> None:
    env = Env(world())
    wait = WaitPolicy().act(env.reset().view, ())[0].action
    result, _ = env.step(wait.replace(op=torch.full_like(wait.op, Op.PRUNE)))
    assert result.state.signals.last_op.tolist() == [Op.PRUNE] * ENVS
    assert not result.state.signals.last_success.any()
