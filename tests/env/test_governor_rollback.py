"""Faults put into the weights of running envs: the governor rolls back, the penalty is paid, and
nobody else notices.

Three rounds are played once: without faults, with another fault in each of four envs, and with
every fault in all envs.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.agent.rollout import Rollout
from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import GovernorConfig
from esper_soa.config.nets import TaskConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.governor import REASON_NAMES, PanicReason
from esper_soa.env.step import StepData
from esper_soa.env.world import World
from esper_soa.nets.data.datasets import load_images
from esper_soa.state import Decision, EnvState, View
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.metrics import RoundResult
from esper_soa.vocabulary import Op
from tests.builders.recording_agent import RecordingAgent
from tests.builders.tiny_world import CPU, quiet_progress, rules_from, tiny_settings

QUIET = quiet_progress()
NUM_ENVS = 6
STEPS = 20

Damage = Callable[[Tensor], Tensor]  # host parameters [n, P] -> damaged ones


def poisoned(params: Tensor) -> Tensor:
    """One weight of the first convolution is NaN."""
    return params.index_fill(1, torch.tensor([3]), math.nan)


def infinite(params: Tensor) -> Tensor:
    """One weight is infinite."""
    return params.index_fill(1, torch.tensor([3]), math.inf)


def exploding(params: Tensor) -> Tensor:
    """The classifier (32 channels, 10 classes) is a million times too large, and wrong."""
    return torch.cat([params[:, :-330], -1e6 * params[:, -330:]], dim=1)


def erased(params: Tensor) -> Tensor:
    """All is zero: the host can only guess."""
    return torch.zeros_like(params)


class Fault(NamedTuple):
    """Damage before the training pass of env-step `step` (from 0), which must end in a rollback."""

    step: int
    damage: Damage
    rollback: int  # env-step
    reason: int
    snapshot: int  # env-step of the snapshot that is given back; START for the initial host


START = -1
# Snapshots are due at every fifth env-step: 4, 9, 14 and 19. A divergent loss is a panic when it is
# the third in a row, so the host that explodes at 8 gets no snapshot at 9. A collapse can only be
# seen in a host that has learned.
MIXED = {
    0: Fault(3, poisoned, 3, PanicReason.NOT_FINITE, START),
    2: Fault(6, infinite, 6, PanicReason.NOT_FINITE, 4),
    3: Fault(8, exploding, 10, PanicReason.DIVERGED, 4),
    4: Fault(12, erased, 12, PanicReason.COLLAPSED_TO_CHANCE, 9),
}  # by env; 1 and 5 have no fault, and 4 envs train together, so 1 shares its chunk with 0, 2 and 3
EVERYWHERE = (
    Fault(11, erased, 11, PanicReason.COLLAPSED_TO_CHANCE, 9),
    Fault(12, poisoned, 12, PanicReason.NOT_FINITE, 9),
    Fault(15, infinite, 15, PanicReason.NOT_FINITE, 14),
    Fault(16, exploding, 18, PanicReason.DIVERGED, 14),
)


def settings() -> TrainConfig:
    """Hosts that learn the ten synthetic patterns within a few env-steps."""
    cfg = tiny_settings(NUM_ENVS, 2, STEPS)
    cfg.task = TaskConfig(name="quick", base_channels=4, num_blocks=4, num_pools=4, host_lr=0.1)
    cfg.slots = ["r0c0", "r0c1"]
    cfg.batch_size = 16
    cfg.train_samples = 64
    cfg.val_samples = 32
    cfg.data.synthetic_train = 64
    cfg.data.synthetic_test = 32
    cfg.data.augment = False
    cfg.governor = GovernorConfig(min_samples=3)
    return cfg


class FaultyWorld(World):
    """A world whose hosts are damaged before the training pass of declared env-steps."""

    def __init__(self, cfg: TrainConfig, faults: Mapping[int, list[tuple[Tensor, Damage]]]) -> None:
        super().__init__(rules_from(cfg), load_images(cfg.data, CPU), cfg.seed)
        self.faults = faults

    def work(self, step: int) -> StepData:
        for envs, damage in self.faults.get(step, []):
            params = self.weights["host", "params"]
            params[envs] = damage(params[envs])
        return super().work(step)


class WeightWitness(RecordingAgent):
    """Keeps the memories too, and the weights of the moment."""

    def __init__(self, agent: Agent, world: World) -> None:
        super().__init__(agent)
        self.world = world
        self.memories: list[Memory] = []
        self.weights: list[TensorDict] = []

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        self.memories.append(memory)
        self.weights.append(self.world.weights.clone())
        return super().act(view, memory)


class Played(NamedTuple):
    """All about one round; lists are by env-step, the view after the last at their ends."""

    recording_agent: WeightWitness
    rollout: Rollout
    result: RoundResult
    learner: Learner
    update: dict[str, float]

    def state(self, step: int) -> EnvState:
        return self.recording_agent.views[step].state


def play(faults: Mapping[int, list[tuple[Tensor, Damage]]]) -> Played:
    """One round of `settings()`."""
    world = FaultyWorld(settings(), faults)
    cfg = PolicyConfig(network=NetworkConfig(hidden=16, features=16), ppo=PPOConfig(epochs=1))
    policy = RecurrentPolicy(cfg, world.rules.setup.shape.slots, 0)
    learner = Learner(policy, cfg.ppo, 10, 0)
    recording_agent = WeightWitness(policy, world)
    result, rollout = play_round(world, Player(recording_agent, learner), Round(0, QUIET))
    assert rollout is not None
    return Played(recording_agent, rollout, result, learner, learner.update(rollout))


@pytest.fixture(scope="module")
def clean() -> Played:
    return play({})


@pytest.fixture(scope="module")
def mixed() -> Played:
    return play({fault.step: [(torch.tensor([env]), fault.damage)] for env, fault in MIXED.items()})


@pytest.fixture(scope="module")
def everywhere() -> Played:
    return play({fault.step: [(torch.arange(NUM_ENVS), fault.damage)] for fault in EVERYWHERE})


EXPECTED: dict[str, list[tuple[int, Fault]]] = {
    "clean": [],
    "mixed": list(MIXED.items()),
    "everywhere": [(env, fault) for fault in EVERYWHERE for env in range(NUM_ENVS)],
}


def reasons_of(faults: list[tuple[int, Fault]]) -> Tensor:
    """int64 [T, N]: the reason of every rollback, 0 where there is none."""
    reasons = torch.zeros(STEPS, NUM_ENVS, dtype=torch.int64)
    for env, fault in faults:
        reasons[fault.rollback, env] = fault.reason
    return reasons


@pytest.fixture(params=["clean", "mixed", "everywhere"])
def case(request: pytest.FixtureRequest) -> tuple[Played, Tensor]:
    """A round and the rollbacks that it must have."""
    return request.getfixturevalue(request.param), reasons_of(EXPECTED[request.param])


def test_every_fault_is_rolled_back_at_its_env_step_and_ends_the_trajectory_with_the_penalty(
    case,
) -> None:
    played, reasons = case
    rows = played.rollout.rows
    panic = reasons > 0
    guards = [played.state(step).guard for step in range(STEPS)]
    assert torch.equal(torch.stack([guard.panic for guard in guards]), panic)
    assert torch.equal(
        torch.where(panic, torch.stack([guard.reason for guard in guards]), 0), reasons
    )
    assert torch.equal(rows.terminal, panic)
    assert rows.valid.all()
    # the death penalty, at most policy.ppo.reward_clip, not scaled
    assert (rows.reward[panic] == -10.0).all()
    assert (rows.action.op[panic] == Op.WAIT).all()
    assert rows.forced[panic].all()
    assert torch.equal(rows.truncated[-1], ~panic[-1])
    assert not rows.truncated[:-1].any()


def test_the_agent_starts_afresh_after_a_rollback(case) -> None:
    played, reasons = case
    panic = reasons > 0
    assert torch.equal(played.rollout.rows.reset[1:], panic[:-1])
    assert not played.rollout.rows.reset[0].any()
    for step in range(STEPS):
        fresh = panic[step]
        assert all((part[fresh] == 0).all() for part in played.recording_agent.memories[step + 1])


@pytest.mark.parametrize("kind", ["mixed", "everywhere"])
def test_weights_go_back_to_the_last_healthy_snapshot_without_momentum(kind: str, request) -> None:
    played = request.getfixturevalue(kind)
    world = FaultyWorld(settings(), {})
    world.start_round(0)
    initial = world.weights
    for env, fault in EXPECTED[kind]:
        now = played.recording_agent.weights[fault.rollback][env]
        then = (
            initial if fault.snapshot == START else played.recording_agent.weights[fault.snapshot]
        )[env]
        for part in ("params", "statistics"):
            assert torch.equal(now["host", part], then["host", part]), (env, fault)
        assert (now["host", "momentum"] == 0).all()
        assert all((pool["momentum"] == 0).all() for pool in now["seeds"].values())


def untouched(env: int) -> int:
    """Env-steps before a fault of the mixed round reaches the env."""
    return MIXED[env].step if env in MIXED else STEPS


@pytest.mark.parametrize("env", range(NUM_ENVS))
def test_rollbacks_of_others_change_no_weight_of_an_env_by_a_bit(
    clean: Played, mixed: Played, env: int
) -> None:
    for step in range(untouched(env)):
        assert (
            clean.recording_agent.weights[step][env] == mixed.recording_agent.weights[step][env]
        ).all()
        assert (clean.state(step)[env] == mixed.state(step)[env]).all()
    for name in ("effective_op", "terminal", "truncated", "reset", "valid"):
        one = clean.rollout.rows.get(name)
        other = mixed.rollout.rows.get(name)
        assert torch.equal(one[: untouched(env), env], other[: untouched(env), env]), name


def test_the_policy_and_the_normalisers_never_see_anything_that_is_not_finite(case) -> None:
    played, _ = case
    assert_finite(played.rollout.rows.to_tensordict())
    assert played.rollout.bootstrap.isfinite().all()
    learner = played.learner
    moments = (*learner.reward, *learner.value, *learner.policy.observation_moments)
    assert all(part.isfinite().all() for part in (*moments, *learner.policy.parameters()))
    for view in played.recording_agent.views:
        assert_finite(view.to_tensordict())


def assert_finite(record: TensorDict) -> None:
    for name, value in record.flatten_keys(".").items():
        assert value.isfinite().all(), name


def test_training_goes_on_and_the_final_metrics_are_finite(case) -> None:
    played, reasons = case
    assert_finite(played.recording_agent.weights[-1])
    result = played.result
    assert all(
        math.isfinite(number)
        for number in (*result.accuracies, *result.rewards, *played.update.values())
    )
    assert math.isfinite(result.record["val_loss"])
    assert played.update["steps"] >= 1
    counts = {name: int((reasons == code).sum()) for code, name in enumerate(REASON_NAMES) if code}
    assert result.record["rollbacks"] == {"total": int((reasons > 0).sum())} | counts
    assert result.seeds["rollbacks"] == int((reasons > 0).sum())


def test_the_reward_normaliser_takes_no_penalty_for_a_reward(everywhere: Played) -> None:
    # 20 env-steps of 6 envs, less 4 rollbacks of each
    assert everywhere.learner.reward.seen == (STEPS - 4) * NUM_ENVS


def test_without_the_governor_nothing_is_rolled_back() -> None:
    cfg = tiny_settings(2, 2, 4)
    cfg.governor = GovernorConfig(enabled=False)
    world = FaultyWorld(cfg, {1: [(torch.tensor([0]), poisoned)]})
    result, _ = play_round(world, Player(WaitPolicy(), None), Round(0, QUIET))
    assert result.seeds["rollbacks"] == 0
    assert world.weights["host", "params"][0].isnan().any()
    assert world.weights["host", "params"][1].isfinite().all()
