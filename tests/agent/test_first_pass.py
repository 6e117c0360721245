"""Log-probabilities that a rollout stores are the update's: before any step, ratios are 1."""

import pytest
import torch

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.optimizer import flatten
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import NetworkConfig, PPOConfig
from esper_soa.config.env import GovernorConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.players import build_player
from tests.builders.tiny_world import CPU, quiet_progress, tiny_settings

ENVS = 3
SLOTS = 3
STEPS = 14
ROUNDS = 4
STANDS_STILL = 1e-30  # a learning rate that moves nothing but zeros, and those to 1e-30
DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda", 0),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ),
]


def settings(**ppo: object) -> TrainConfig:
    """Hosts that are rolled back as soon as their loss is above its mean."""
    cfg = tiny_settings(ENVS, SLOTS, STEPS)
    cfg.governor = GovernorConfig(
        sensitivity=0.0, multiplier=1.0, absolute_threshold=0.0, min_panics=1, min_samples=3
    )
    cfg.policy.network = NetworkConfig(hidden=32, features=32, layers=2)
    cfg.policy.ppo = PPOConfig(**ppo)
    return cfg


def play(
    cfg: TrainConfig, device: torch.device = CPU
) -> tuple[Learner, list[Rollout], list[dict[str, float]]]:
    """All rounds with their updates; the world is the same in every one, the policy is not."""
    world = build_world(cfg, device)
    player = build_player(cfg.policy, world)
    learner = player.learner
    rollouts = []
    reports = []
    assert learner is not None
    for number in range(ROUNDS):
        step = Round(number, quiet_progress())
        _, rollout = play_round(world, Player(player.agent, learner), step)
        assert rollout is not None
        rollouts.append(rollout)
        reports.append(learner.update(rollout))
    return learner, rollouts, reports


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Of a policy that stands still; only its observations' statistics move between rounds."""
    return play(settings(lr=STANDS_STILL, epochs=1, observation_momentum=0.5))[1]


def untrained(**ppo: object) -> Learner:
    """The learner that played them, as it was before the first round."""
    cfg = settings(lr=STANDS_STILL, observation_momentum=0.5, **ppo)
    learner = build_player(cfg.policy, build_world(cfg, CPU)).learner
    assert learner is not None
    return learner


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_first_pass_over_every_rollout_has_ratio_one(device: torch.device) -> None:
    learner, rollouts, reports = play(
        settings(lr=3e-3, target_kl=0.0, observation_momentum=0.5), device
    )
    assert max(report["ratio_error_first"] for report in reports) < 1e-5
    assert all(report["ratio_max"] - report["ratio_min"] > 1e-3 for report in reports), (
        "the policy has not moved"
    )
    assert (learner.policy.mean.abs() > 0.05).any(), "the normaliser has not moved"


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_every_pass_without_a_move_has_ratio_one(rollouts: list[Rollout], minibatches: int) -> None:
    learner = untrained(epochs=2, minibatches=minibatches)
    before = flatten(learner.parameters)
    for rollout in rollouts:
        report = learner.update(rollout)
        assert report["steps"] == 2 * minibatches
        assert 1 - 1e-5 < report["ratio_min"] <= report["ratio_max"] < 1 + 1e-5
        assert report["approx_kl"] < 1e-9
        assert report["clip_fraction"] == 0.0
    torch.testing.assert_close(flatten(learner.parameters), before, rtol=0, atol=1e-25)


def test_those_rollouts_hold_all_that_could_go_wrong(rollouts: list[Rollout]) -> None:
    rows = torch.cat([rollout.rows for rollout in rollouts], dim=1)
    assert (rows.terminal[:-1] & rows.reset[1:]).any(), "no rollback cut a trajectory"
    assert rows.forced.any()
    assert (~rows.forced).any()
    assert (~rows.masks.op).any()
    played = set(rows.action.op.unique().tolist())
    assert len(played) >= 4, f"only the ops {played} were played"


def test_a_changed_observation_is_noticed(rollouts: list[Rollout]) -> None:
    rows = rollouts[0].rows.clone()
    rows.features[3, 1] += 3.0
    same, changed = (
        untrained(epochs=1).update(Rollout(r, rollouts[0].bootstrap))
        for r in (rollouts[0].rows, rows)
    )
    assert same["ratio_error_first"] < 1e-5
    assert changed["ratio_error_first"] > 1e-4


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (4, 3)])
def test_an_update_reads_the_device_twice_whatever_its_size(
    rollouts: list[Rollout], epochs: int, minibatches: int
) -> None:
    learner = untrained(epochs=epochs, minibatches=minibatches)
    with SyncGuard(["segment_starts", "read_diagnostics"]) as guard:
        learner.update(rollouts[0])
    assert [sync.function for sync in guard.log] == ["segment_starts", "read_diagnostics"]
