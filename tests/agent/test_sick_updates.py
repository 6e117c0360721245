"""Anomaly rules against real updates made sick on purpose: told once, and what to do."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import PPOConfig
from esper_soa.config.settings import AnomalyConfig
from esper_soa.training.results import anomalies
from esper_soa.training.results.anomalies import Watch
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.agent_world import random_rollout, small_policy

NO_FLOOR = dict.fromkeys(HEAD_NAMES, 0.0)
Infection = Callable[[Learner], None]
Fault = Callable[[Rollout], None]


def learner_of(**ppo: object) -> Learner:
    settings = {"target_kl": 0.0, "probability_floor": NO_FLOOR} | ppo
    policy = small_policy(2, probability_floor=settings["probability_floor"])
    return Learner(policy, PPOConfig(**settings), total_updates=100, seed=0)


def updates(
    watch: Watch, learner: Learner, count: int, fault: Fault | None = None, envs: int = 4
) -> list[dict[str, str]]:
    """What the watch tells of each of `count` updates."""
    told = []
    for seed in range(count):
        rollout = random_rollout(learner.policy, 16, envs, seed=seed, restarts=0.02)
        if fault is not None:
            fault(rollout)
        told.append(watch.look(learner.update(rollout)))
    return told


@torch.no_grad()
def forget_nothing(learner: Learner) -> None:
    """Input and forget gates open, candidates at 1: the cell counts env-steps."""
    for bias in (learner.policy.lstm.layers[0].bias_ih, learner.policy.lstm.layers[0].bias_hh):
        bias[: 3 * 32] = 20.0


@torch.no_grad()
def close_the_output(learner: Learner) -> None:
    learner.policy.lstm.layers[0].bias_ih[3 * 32 :] = -50.0


@torch.no_grad()
def wild_critic(learner: Learner) -> None:
    learner.policy.value_head[-1].weight.mul_(300.0)


@torch.no_grad()
def always_wait(learner: Learner) -> None:
    last = learner.policy.heads["op"][-1]
    assert isinstance(last, nn.Linear)
    last.bias[0] = 60.0  # so sure that no gradient is left


def large_rewards(rollout: Rollout) -> None:
    rollout.rows.reward.mul_(20.0)


def equal_returns(rollout: Rollout) -> None:
    """All of the reward in the last env-step, the same for every env."""
    rollout.rows.reward.zero_()
    rollout.rows.reward[-1] = 10.0
    rollout.rows.value.zero_()
    rollout.bootstrap.zero_()


def other_policy(rollout: Rollout) -> None:
    """The log-probabilities are not those of the policy."""
    rollout.rows.log_probs[2:4] -= 0.1


def lost_reward(rollout: Rollout) -> None:
    rollout.rows.reward[2, 1] = float("nan")


def lost_contribution(rollout: Rollout) -> None:
    """Spoils the gradient of the minibatch with this env only."""
    rollout.rows.contribution[2, 1] = float("nan")
    rollout.rows.contribution_measured[2, 1] = True


CASES: dict[str, tuple[dict[str, object], Infection | None, Fault | None, str]] = {
    "ratio_explosion": ({"lr": 0.05}, None, None, "policy.ppo.lr"),
    "ratio_collapse": ({"lr": 0.05}, None, None, "policy.ppo.lr"),
    "stale_log_probs": ({}, None, other_policy, "precision"),
    "value_collapse": ({}, None, equal_returns, "policy.ppo.value_coef"),
    "bellman_error": ({}, None, large_rewards, "policy.ppo.value_coef"),
    "lstm_explosion": ({}, forget_nothing, None, "policy.ppo.lr"),
    "lstm_collapse": ({}, close_the_output, None, "observations"),
    "not_finite": ({"minibatches": 2}, None, lost_contribution, "metrics.jsonl"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sick_update_is_told_once_with_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo, infect, fault, advice = CASES[name]
    monkeypatch.setattr(anomalies, "PATIENCE", 1)
    watch = Watch(AnomalyConfig())
    learner = learner_of(**ppo)
    if infect is not None:
        infect(learner)
    first, second = updates(watch, learner, 2, fault)
    assert advice in first[name]
    assert name in watch.active
    assert name not in second


def test_healthy_updates_are_silent() -> None:
    watch = Watch(AnomalyConfig())
    # so many envs that no norm is far off by chance
    assert updates(watch, learner_of(), 3, envs=32) == [{}, {}, {}]
    assert watch.active == []


@pytest.mark.parametrize(
    ("infect", "name"), [(wild_critic, "explained_variance"), (always_wait, "entropy_collapse/op")]
)
def test_what_takes_three_updates_is_told_at_the_third_even_without_a_gradient(
    infect: Infection, name: str
) -> None:
    watch = Watch(AnomalyConfig())
    learner = learner_of(lr=1e-9, epochs=1)
    assert updates(watch, learner, 1) == [{}]
    infect(learner)
    told = updates(watch, learner, 4)
    assert [name in update for update in told] == [False, False, True, False]


@pytest.mark.parametrize(("ppo", "fault"), [({}, lost_reward), ({"target_kl": 1e-4}, other_policy)])
def test_an_update_without_a_step_is_told_with_its_reason(
    ppo: dict[str, object], fault: Fault
) -> None:
    watch = Watch(AnomalyConfig())
    learner = learner_of(**ppo)
    first, second = updates(watch, learner, 2, fault)
    assert "skipped_update" in first
    assert "skipped_update" not in second
