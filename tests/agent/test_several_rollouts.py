"""One update of the policy from rollouts of several tasks."""

import pytest
import torch

from esper_soa.agent.optimizer import flatten
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import PPOConfig
from esper_soa.nets.graphs import StepCache
from tests.builders.agent_world import learner_of, random_rollout, small_policy, some_slots


def test_an_update_of_two_rollouts_is_that_of_one_with_the_envs_of_both() -> None:
    ppo = {"epochs": 3, "contribution_coef": 0.7, "contribution_warmup": 0}
    one, two = learner_of(**ppo), learner_of(**ppo)
    for learner in (one, two):
        # no unit is dropped: dropout goes by the numbers of envs
        learner.dropout_noise = lambda rollout, envs, epoch: torch.ones(4, len(envs), 16)  # type: ignore
    rollouts = [random_rollout(one.policy, 4, envs, seed=envs) for envs in (3, 5)]
    rows = torch.cat([rollout.rows for rollout in rollouts], 1)
    whole = Rollout(rows, torch.cat([rollout.bootstrap for rollout in rollouts]))
    two.policies.append(two.policy.for_slots(some_slots(2)))
    reports = one.update(whole), two.update(*rollouts)
    moved = flatten(one.parameters)
    assert (moved - flatten(learner_of(**ppo).parameters)).abs().max() > 5e-4
    torch.testing.assert_close(flatten(two.parameters), moved, rtol=0, atol=2e-6)
    for report in reports:
        # of cells at the ends of stretches between restarts, which are those of a rollout
        del report["lstm_cell_rms"], report["lstm_cell_max"], report["lstm_rms_max"]
    assert reports[0] == pytest.approx(reports[1], rel=1e-3, abs=1e-5)
    for name in ("mean", "var", "seen"):
        torch.testing.assert_close(getattr(one.policy, name), getattr(two.policy, name))
    for mine, its in zip(one.value, two.value, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_policy_for_other_slots_has_the_weights_and_statistics_of_the_first() -> None:
    policy = small_policy(2)
    policy.steps = StepCache(capture=False)
    other = policy.for_slots(some_slots(3))
    assert other.steps is None  # what is kept is of hosts with these slots
    places = policy.places.clone()
    assert torch.equal(other.places, small_policy(3).places)
    learner = Learner(policy, PPOConfig(epochs=1), total_updates=1, seed=0)
    learner.policies.append(other)
    learner.update(*(random_rollout(one, 4, 3, seed=1) for one in (policy, other)))
    assert policy.mean.abs().max() > 0
    for name, weight in policy.state_dict().items():
        assert weight.data_ptr() == other.state_dict()[name].data_ptr(), name
    assert torch.equal(policy.places, places)


def test_minibatches_have_envs_of_every_rollout_each_once() -> None:
    minibatches = learner_of().minibatches([4, 6], 2, 0)
    assert [[len(envs) for envs in parts] for parts in minibatches] == [[2, 3], [2, 3]]
    columns = [torch.cat(parts).tolist() for parts in zip(*minibatches, strict=True)]
    assert [sorted(column) for column in columns] == [list(range(4)), list(range(4, 10))]
    alike = learner_of().minibatches([6, 6], 1, 0)
    first, second = (envs.tolist() for envs in alike[0])
    assert first != [env - 6 for env in second]
