"""Imitation in real rounds: within a few of them the policy does what its teacher would do where it
comes to itself.
"""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tiny_world import CPU, tiny_settings

from esper_soa.agent.lstm import segment_starts
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import (
    ImitationConfig,
    NetworkConfig,
    PolicyConfig,
    PPOConfig,
    ScheduleConfig,
)
from esper_soa.config.settings import TrainConfig
from esper_soa.training.build import build_world
from esper_soa.training.collect import Round, play_round
from esper_soa.training.players import build_player
from esper_soa.training.progress import Progress
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES

ENVS = 12
STEPS = 8
ROUNDS = 6
UNITS = 32


def settings() -> TrainConfig:
    floors = dict.fromkeys(HEAD_NAMES, 0.01)
    policy = PolicyConfig(
        network=NetworkConfig(hidden=UNITS, features=UNITS),
        ppo=PPOConfig(probability_floor=floors, minibatches=4),
        imitation=ImitationConfig(rounds=ROUNDS, teacher="schedule", epochs=10, lr=5e-3),
        schedule=ScheduleConfig(
            blueprint="conv_light", germinate=[2], stagger=2, advance=[1, 3], fossilize=5
        ),
    )
    return replace(tiny_settings(ENVS, 2, STEPS), policy=policy)


def agreement(learner: Learner, rollout: Rollout) -> float:
    """Share of the env-steps with a choice on which the likeliest is what the teacher would do."""
    assert rollout.taught is not None
    rows = rollout.rows.replace(action=rollout.taught)
    agreed = 0
    free = 0
    noise = torch.zeros(STEPS, ENVS, UNITS // 2)
    likeliest = learner.policy.evaluate(rows, segment_starts(rows.reset), noise).likeliest.all(-1)
    for t in range(STEPS):
        for env in range(ENVS):
            if bool(rows.valid[t, env]) and int(rows.masks.op[t, env].sum()) > 1:
                free = free + 1
                agreed = agreed + int(likeliest[t, env])
    assert free > STEPS * ENVS / 2
    return agreed / free


@pytest.mark.slow  # agent/test_imitation.py has the cheap twins
@pytest.mark.timeout(600)
def test_a_policy_agrees_with_its_teacher_on_hosts_that_it_has_not_met() -> None:
    cfg = settings()
    world = build_world(cfg, CPU)
    player = build_player(cfg, world)
    quiet = Progress(1, Console(file=io.StringIO()), "off")
    learner = player.learner
    told = []
    assert learner is not None
    assert player.teacher is not None
    for number in range(ROUNDS + 1):
        rollout = play_round(world, player, Round(number, quiet))[1]
        assert rollout is not None
        told.append(agreement(learner, rollout))
        if number < ROUNDS:
            report = learner.imitate(rollout)
    assert told[0] < 0.7
    assert told[-1] > 0.95, told
    assert report["agreement"] > 0.9
    done = rollout.rows.effective_op.unique().tolist()
    assert {OP_NAMES[op] for op in done} >= {"wait", "germinate", "advance"}
