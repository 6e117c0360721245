"""The rollout of a real round, by rows, against what the policy saw, chose, earned; rollbacks."""

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Memory
from esper_soa.agent.rollout import Rollout
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import NetworkConfig, PPOConfig
from esper_soa.config.env import EarlyStopConfig, GovernorConfig, RewardConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.step import StepResult, look
from esper_soa.env.world import World
from esper_soa.state import Action, Decision, EnvState, View
from esper_soa.training.loop import collect
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.training.loop.recorder import Facts, Recorder
from esper_soa.training.results.metrics import PendingCopy
from esper_soa.training.results.progress import Progress
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.tiny_world import CPU, tiny_settings

ENVS = 3
SLOTS = 2
STEPS = 12
REWARD_CLIP = 1.5


class LateCopy:
    """Stands in for the event behind a copy to the host that takes its time."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.seen.append("waited")
        self.done = True


def test_numbers_on_their_way_are_told_in_order_once_they_are_there_and_waited_for_at_the_end_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = tiny_settings(2, 1, 5)
    quiet = Progress(10, Console(file=io.StringIO()), "off")
    seen = list[str]()
    copies = list[LateCopy]()

    def late(state: EnvState, *given: Tensor | None) -> PendingCopy:
        copies.append(LateCopy(seen))
        return PendingCopy(torch.tensor([len(copies), 0.0]), copies[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(collect, "read_progress", late)
    monkeypatch.setattr(
        quiet, "advance", lambda envs, label, accuracy, reward: seen.append(f"{accuracy:g}")
    )
    episode = EpisodeRunner(build_world(cfg, CPU), Player(RandomPolicy(), None), Round(0, quiet))
    for step in range(5):
        episode.step_()
        if step == 2:
            copies[0].done = copies[1].done = True
    assert seen == ["1", "2"]
    for copy in copies[2:4]:
        copy.done = True
    episode.finish()
    assert seen == ["1", "2", "waited", "3", "4", "5"]


def settings() -> TrainConfig:
    """Hosts that are rolled back as soon as their loss is above its mean."""
    cfg = tiny_settings(ENVS, SLOTS, STEPS)
    cfg.governor = GovernorConfig(
        sensitivity=0.0, multiplier=1.0, absolute_threshold=0.0, min_panics=1, min_samples=3
    )
    cfg.policy.network = NetworkConfig(hidden=16, features=16, layers=2)
    cfg.policy.ppo = PPOConfig(reward_clip=REWARD_CLIP)
    return cfg


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(settings(), CPU)


@pytest.fixture(scope="module")
def learner(world: World) -> Learner:
    found = build_player(settings().policy, world).learner
    assert found is not None
    return found


@pytest.fixture(scope="module")
def played(world: World, learner: Learner) -> Witnessed:
    policy = learner.policy
    assert isinstance(policy, RecurrentPolicy)
    return witnessed_round(world, policy, 0, learner)


@pytest.fixture(scope="module")
def rollout(played: Witnessed) -> Rollout:
    assert played.rollout is not None
    return played.rollout


@pytest.fixture(scope="module")
def panic(played: Witnessed) -> Tensor:
    """bool [T, N]: rolled back at this env-step."""
    found = torch.stack([view.state.guard.panic for view in played.views[:STEPS]])
    assert found.any(), "no host was rolled back"
    assert not found.all()
    return found


def test_a_row_holds_what_was_shown_and_what_was_decided(
    played: Witnessed, rollout: Rollout
) -> None:
    assert len(played.views) == STEPS + 1
    for t in range(STEPS):
        view = played.views[t]
        decision = played.decisions[t]
        row = rollout.rows[t]
        assert torch.equal(row.features, view.observation.features)
        assert torch.equal(row.blueprints, view.observation.blueprints)
        for name, mask in view.masks.items():
            assert torch.equal(row.masks.get(name), mask), name
        for name, choice in decision.action.items():
            assert torch.equal(row.action.get(name), choice), name
        assert torch.equal(row.log_probs, decision.log_probs)
        assert torch.equal(row.value, decision.value)
    assert (rollout.rows.action.op.unique().numel()) >= 3


def test_a_rollback_ends_a_trajectory_and_the_next_env_step_begins_another(
    rollout: Rollout, panic: Tensor
) -> None:
    rows = rollout.rows
    assert torch.equal(rows.terminal, panic)
    assert not rows.reset[0].any()
    assert torch.equal(rows.reset[1:], panic[:-1])
    assert (rows.effective_op[panic] == 0).all()


def test_only_the_last_env_step_is_cut_and_only_where_it_did_not_end(
    rollout: Rollout, panic: Tensor
) -> None:
    assert not rollout.rows.truncated[:-1].any()
    assert torch.equal(rollout.rows.truncated[-1], ~panic[-1])


def test_rewards_are_scaled_by_all_that_came_before_and_those_of_rollbacks_are_only_clipped(
    played: Witnessed, rollout: Rollout, panic: Tensor
) -> None:
    seen: list[float] = []
    for t, earned in enumerate(played.rewards()):
        seen += [
            reward
            for reward, lost in zip(earned.tolist(), panic[t].tolist(), strict=True)
            if not lost
        ]
        mean = sum(seen) / len(seen)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in seen) / (len(seen) - 1))
        scaled = torch.where(panic[t], earned, earned / deviation).clamp(-REWARD_CLIP, REWARD_CLIP)
        torch.testing.assert_close(rollout.rows.reward[t], scaled.float(), rtol=1e-5, atol=1e-6)
    assert rollout.rows.valid.all()


def test_contributions_are_targets_only_where_they_were_measured_just_now(
    played: Witnessed, rollout: Rollout
) -> None:
    measured = older = 0
    for t in range(STEPS):
        slots = played.views[t].state.slots
        row = rollout.rows[t]
        now = slots.contribution_known & (slots.contribution_age == 0)
        assert torch.equal(row.contribution_measured, now)
        assert torch.equal(row.contribution[now], slots.contribution[now].float())
        measured += int(now.sum())
        older += int((slots.contribution_known & ~now).sum())
    assert measured > 0
    assert older > 0, "all that is known was measured just now"


def test_the_value_after_the_last_env_step_is_that_of_the_state_then_with_the_memory_then(
    played: Witnessed, rollout: Rollout, learner: Learner, world: World, panic: Tensor
) -> None:
    policy = learner.policy
    _, after = look(world.rules, played.states[-1])
    features = torch.cat([rollout.rows.features, after.features.unsqueeze(0)])
    blueprints = torch.cat([rollout.rows.blueprints, after.blueprints.unsqueeze(0)])
    reset = torch.cat([rollout.rows.reset, panic[-1:]])
    with torch.no_grad():
        x, _ = policy.lstm.sequence(
            policy.encode(features, blueprints)[1], reset, list(range(STEPS + 1))
        )
        values = policy.value_head(x).squeeze(-1)
    torch.testing.assert_close(rollout.rows.value, values[:-1], rtol=0, atol=1e-5)
    going_on = ~panic[-1]
    torch.testing.assert_close(rollout.bootstrap[going_on], values[-1][going_on], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_rows_memory_and_value_of_an_episode_that_ends_early_stay_as_it_ended(
    ending: str, learner: Learner
) -> None:
    def rollout_of(lengths: list[int]) -> Rollout:
        early = EarlyStopConfig(length=str(lengths))
        cfg = replace(settings(), governor=GovernorConfig(), early_stop=early)
        world = build_world(replace(cfg, reward=RewardConfig(episode_end=ending)), CPU)
        shown = io.StringIO()
        progress = Progress(ENVS * STEPS, Console(file=shown), "plain", interval=1e9)
        _, rollout = play_round(world, Player(learner.policy, learner), Round(0, progress))
        assert rollout is not None
        # a line at the end, which comes with the last env-step that is played
        assert shown.getvalue().startswith(f"  {sum(lengths)}/{sum(lengths)} env-steps")
        return rollout

    lengths = [3, STEPS, 7]
    found = rollout_of(lengths)
    for env, length in enumerate(lengths):
        played = [step < length for step in range(STEPS)]
        assert found.rows.valid[:, env].tolist() == played
        cut = [step == length - 1 and ending == "truncated" for step in range(STEPS)]
        assert found.rows.truncated[:, env].tolist() == cut
    assert found.bootstrap[0] == rollout_of([3, 3, 3]).bootstrap[0]


def test_every_env_step_is_played_with_its_own_noise(played: Witnessed, world: World) -> None:
    world.start_round(0)
    for t, view in enumerate(played.views):
        assert torch.equal(view.noise, world.noise(t))


def test_a_reward_that_is_not_finite_is_no_row_and_a_full_record_has_probabilities(
    world: World, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.full = True
    facts = list[Facts]()
    monkeypatch.setattr(recorder, "pack", facts.append)
    quiet = Progress(ENVS, Console(file=io.StringIO()), "off")
    agent = learner.policy
    assert isinstance(agent, RecurrentPolicy)
    request = Round(0, quiet, recorder=recorder)
    episode = EpisodeRunner(world, Player(agent, learner), request)
    apply = episode.env.apply_action_

    def lose_a_reward(action: Action) -> StepResult:
        result = apply(action)
        result.terms.total[1] = math.nan
        return result

    monkeypatch.setattr(episode.env, "apply_action_", lose_a_reward)
    episode.step_()
    assert episode.rollout is not None
    assert episode.rollout.rows.valid[0].tolist() == [True, False, True]
    assert facts[0].probabilities is not None


def test_a_round_without_a_learner_has_no_rollout_and_the_same_hosts(
    played: Witnessed, world: World, learner: Learner
) -> None:
    alone = witnessed_round(world, learner.policy, 0)
    assert alone.rollout is None
    assert len(alone.views) == STEPS
    assert alone.result.episodes == played.result.episodes


class Counter:
    """Takes the n-th legal op at the n-th env-step since its restart, and keeps its memory."""

    def __init__(self) -> None:
        self.remembered: list[Tensor] = []

    def start(self, num_envs: int, device: torch.device) -> Memory:
        return (torch.zeros(num_envs, dtype=torch.int64, device=device),)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        self.remembered.append(memory[0])
        noise = view.noise.new_zeros(view.noise.shape)
        noise[:, HEAD_NAMES.index("op")] = (memory[0] % 6) / 6
        decision, _ = RandomPolicy().act(view.replace(noise=noise), ())
        return decision, (memory[0] + 1,)


def test_a_teacher_is_asked_on_the_states_that_the_policy_came_to_and_changes_nothing_else(
    played: Witnessed, world: World, learner: Learner, panic: Tensor
) -> None:
    teacher = Counter()
    before = learner.reward
    taught = witnessed_round(world, learner.policy, 0, learner, teacher).rollout
    learner.reward = before
    assert taught is not None
    assert taught.taught is not None
    assert played.rollout is not None
    assert played.rollout.taught is None
    for name, choice in played.rollout.rows.action.items():
        assert torch.equal(taught.rows.action.get(name), choice), name
    count = torch.zeros(ENVS, dtype=torch.int64)
    disagreed = 0
    for t in range(STEPS):
        count = torch.where(panic[t - 1], 0, count) if t else count
        decision, (after,) = teacher.act(played.views[t], (count,))
        assert torch.equal(teacher.remembered[t], count), t
        for name, choice in decision.action.items():
            assert torch.equal(taught.taught.get(name)[t], choice), (t, name)
        disagreed += int((decision.action.op != played.decisions[t].action.op).sum())
        count = after
    assert disagreed > 0
    assert len(taught.taught.op.unique()) > 2
