"""The smallest worlds that can go wrong: tiny hosts on synthetic images, and episodes of the state
kernels alone.

`made_up` stands in for training and validation: it gives measurements with the subset rows that a
real evaluation of the present seeds would have, and random accuracies, so that long episodes cost
nothing. Everything is a function of a seed and the env-step, on any device.
"""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from rich.console import Console
from torch import Tensor

from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.env import REWARD_MODE, GatesConfig, LifecycleConfig, RewardConfig
from esper_soa.config.nets import DataConfig, TaskConfig, host_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.governor import discard_panicked, watch
from esper_soa.env.reduction import Reduction
from esper_soa.env.step import (
    EnvRules,
    EnvView,
    Recorded,
    StepResult,
    apply_action,
    initial_state,
    record_and_observe,
)
from esper_soa.env.world import World, values_of_envs
from esper_soa.nets.passes import PieceEngine, StepPlan
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.nets.seeds.subsets import max_rows
from esper_soa.nets.setup import Setup
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.state import (
    STATE_FLOAT,
    Action,
    EnvState,
    GradientStats,
    Measurements,
    Slots,
    View,
    stage_in,
)
from esper_soa.system.streams import POLICY_SAMPLE, stream_keys, uniform
from esper_soa.system.transfers import move_records
from esper_soa.training.loop.build import build_rules, build_world, make_setup
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import Progress
from esper_soa.vocabulary import HEADS, Stage

CPU = torch.device("cpu")
BREAKDOWNS = 0.01  # share of env-steps with a loss that is not finite
MEASURED_STAGES = (Stage.TRAINING, Stage.BLENDING)
# ten slots
SCALE_TASK = TaskConfig(
    name="cifar_scale", base_channels=1, num_blocks=5, kernel_size=1, num_pools=5
)
SMALL_TASK = TaskConfig(name="tiny", base_channels=2, num_blocks=3, kernel_size=1, num_pools=3)


class SingleEnv(Reduction):
    """The reduction of a process that has one env of a run of several."""

    def __init__(self, env: int, num_envs: int) -> None:
        self.first_env = env
        self.num_envs = num_envs

    def all_envs(self, num_here: int) -> int:
        return self.num_envs

    def rows_here(self, entries: Tensor, dim: int = 0) -> Tensor:
        return entries.narrow(dim, self.first_env, 1)


def quiet_progress() -> Progress:
    """Says nothing."""
    return Progress(1, Console(file=io.StringIO()), "off")


def tiny_settings(
    num_envs: int, num_slots: int, steps: int, reward: RewardConfig | None = None
) -> TrainConfig:
    """A run of hosts with some hundred weights, whose seeds mature in a few env-steps.

    One worker: modes that watch operations, as sync_guard's, see those of their own thread alone.
    """
    task = SMALL_TASK if num_slots <= 6 else SCALE_TASK
    return TrainConfig(
        device="cpu",
        envs=num_envs,
        steps=steps,
        rounds=1,
        batch_size=2,
        train_samples=2,
        val_samples=4,
        slots=[spec.name for spec in host_slots(task)[:num_slots]],
        task=task,
        data=DataConfig(name="synthetic", synthetic_train=16, synthetic_test=8),
        gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.3),
        lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
        reward=reward or RewardConfig(),
        compute=ComputeConfig(workers=1),
    )


def rules_from(
    cfg: TrainConfig, device: torch.device = CPU, ranks: Ranks = SINGLE_PROCESS
) -> EnvRules:
    """The rules of the settings on `device`, for the envs of a rank."""
    return build_rules(cfg, make_setup(cfg, device, ranks))


def tiny_rules(
    num_slots: int, steps: int, reward: RewardConfig | None = None, device: torch.device = CPU
) -> EnvRules:
    """The rules of `tiny_settings`, on `device`."""
    return rules_from(tiny_settings(1, num_slots, steps, reward), device)


def tiny_world(num_envs: int, num_slots: int, steps: int) -> World:
    """N hosts with weights and images on the CPU."""
    return build_world(tiny_settings(num_envs, num_slots, steps), CPU)


def random_round(world: World) -> RoundResult:
    """What an episode of random play gives."""
    return play_round(world, Player(RandomPolicy(), None), Round(0, quiet_progress()))[0]


def assert_alone(cfg: TrainConfig) -> None:
    """Assert that the first envs of a run end as they do in one without the last env."""
    many, few = (build_world(replace(cfg, envs=envs), CPU) for envs in (cfg.envs, cfg.envs - 1))
    every, first = (random_round(world) for world in (many, few))
    assert every.accuracies[:-1] == first.accuracies
    assert every.rewards[:-1] == first.rewards
    for name, rows in few.weights.flatten_keys(".").items():
        assert torch.equal(many.weights.flatten_keys(".")[name][:-1], rows), name
    assert sum(pool["params"].abs().sum() for pool in many.weights["seeds"].values()) > 0


def seeds_where(
    running: ArrayLike, stage: ArrayLike, blueprint: ArrayLike, blend: ArrayLike, **flags: ArrayLike
) -> ActiveSeeds:
    """Active seeds where `running` bool [N, S]; codes and flags are of that shape, or one for all.

    Those beyond TRAINING are visible and ablated; other flags are False but where they are given.
    """
    size = np.shape(running)
    codes = [np.broadcast_to(one, size).copy() for one in (stage, blueprint, blend)]
    visible = np.asarray(running, bool) & (codes[0] != Stage.TRAINING)
    given = dict.fromkeys(ActiveSeeds._fields[4:], False) | {"visible": visible, "ablated": visible}
    found = {name: np.array(np.broadcast_to(one, size)) for name, one in (given | flags).items()}
    return ActiveSeeds(np.asarray(running, bool), *codes, **found)


def planned(engine: PieceEngine, setup: Setup, seeds: ActiveSeeds) -> StepPlan:
    """The passes of an env-step in which nothing is newborn."""
    return move_records(engine.plan(setup, seeds), setup.device)


def silence_hosts_(world: World) -> None:
    """Leave hosts of images a gradient below the rounding of none, and seeds behind the last block
    one that is not.

    No image gets through that block; every label is 0, of which the classifier is sure; its weights
    are large.
    """
    world.data.train_labels.zero_()
    params = world.weights["host", "params"]
    *_, scale, shift, weight, bias = world.rules.setup.shape.parameters.unpack(params)
    scale.zero_()
    shift.fill_(-1.0)
    weight.mul_(1e5)
    bias.zero_()
    bias[:, 0] = 22.0


def random_numbers(seed: int, step: int, like: Tensor) -> Tensor:
    """float64 in [0, 1), shape and device of `like`, a function of seed, env-step, place."""
    env = torch.zeros((), dtype=torch.int64, device=like.device)
    keys = stream_keys(seed, POLICY_SAMPLE, (step,), env)
    places = torch.arange(like.numel(), device=like.device)
    return uniform(keys, places, STATE_FLOAT).view(like.shape)


class Draw:
    """Random numbers, fresh ones with every call."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls = 0

    def like(self, pattern: Tensor) -> Tensor:
        """float64 in [0, 1) with the shape and device of `pattern`."""
        self.calls += 1
        return random_numbers(self.seed, self.calls, pattern)


def subset_rows(slots: Slots, ablated: Tensor) -> Tensor:
    """int64 [N, R]: the rows of an evaluation with the seeds `ablated` bool [N, S]; -1 = row not
    evaluated.
    """
    num_envs, num_slots = ablated.shape
    bits = 1 << torch.arange(num_slots, device=ablated.device)
    full = torch.where(ablated, bits, 0).sum(1, keepdim=True)
    if num_slots <= 4:
        off = torch.arange(2**num_slots, device=ablated.device).expand(num_envs, -1)
        return torch.where((off & ~full) == 0, full - off, -1)
    fossils = torch.where(ablated & (slots.stage == Stage.FOSSILIZED), bits, 0).sum(1, keepdim=True)
    left_out = torch.where(ablated, full - bits, -1)
    alone = torch.where(ablated, bits, -1)
    one, other = torch.triu_indices(num_slots, num_slots, 1, device=ablated.device).unbind(0)
    pairs = torch.where(ablated[:, one] & ablated[:, other], bits[one] | bits[other], -1)
    rows = torch.cat([full, left_out, alone, torch.zeros_like(full), fossils, pairs], dim=1)
    rows.masked_fill_((rows[:, :, None] == rows[:, None, :]).tril(-1).any(-1), -1)
    return F.pad(rows, (0, max_rows(num_slots) - rows.shape[1]), value=-1)


def made_up(rules: EnvRules, state: EnvState, seed: int) -> Measurements:
    """Measurements of the seeds in `state` with random numbers: healthy gradients mostly, here and
    there a NaN loss.
    """
    slots = state.slots
    signals = state.signals
    ablated = slots.running & (slots.alpha > 0)
    if rules.reward.config.drip_fraction == 0:
        ablated = ablated & (slots.stage != Stage.FOSSILIZED)
    subset = subset_rows(slots, ablated)
    draw = Draw(seed)
    measured = stage_in(slots.stage, MEASURED_STAGES)
    health = draw.like(slots.alpha)
    gradients = GradientStats(
        l2=torch.where(measured, 3 * draw.like(slots.alpha), 0.0),
        health=torch.where(measured, health, 0.0),
        vanishing=measured & (health < 0.3),
        exploding=measured & (health < 0.1),
        ratio=torch.where(measured, 2 * draw.like(slots.alpha), 0.0),
        measured=measured,
        batch_size=slots.batch_size,
    )
    return Measurements(
        train_loss=0.5 + draw.like(signals.val_loss),
        train_accuracy=100 * draw.like(signals.val_loss),
        val_loss=torch.where(
            draw.like(signals.val_loss) < BREAKDOWNS, torch.nan, 0.5 + draw.like(signals.val_loss)
        ),
        accuracy=torch.where(subset >= 0, 100 * draw.like(subset), 0.0),
        subset=subset,
        ablated=ablated,
        gradients=gradients,
        batch_size=state.batch_size,
    )


class EnvStep(NamedTuple):
    """Everything that one env-step of the env state went through."""

    measured: Measurements
    before: EnvState  # with the verdict of the loss watch
    observed: EnvView
    action: Action
    result: StepResult

    @property
    def view(self) -> View:
        """What the agent saw."""
        return self.observed.view

    @property
    def trusted(self) -> Measurements:
        """What was measured, without that of envs that panic."""
        return self.observed.measured


def view_of(recorded: Recorded, seed: int) -> View:
    """What an agent is shown, with its noise."""
    state, _, masks, observation = recorded
    num_envs = masks.op.shape[0]
    pattern = observation.features.new_empty(num_envs, 8, dtype=STATE_FLOAT)
    # of eight heads: further ones move none of them
    noise = F.pad(random_numbers(seed, 0, pattern).float(), (0, len(HEADS) - 8), value=0.5)
    return View(state, observation, masks, noise, batch_size=[num_envs])


def observed_of(recorded: Recorded, trusted: Measurements, seed: int) -> EnvView:
    """What `Env.observe_` would give."""
    return EnvView(view_of(recorded, seed), recorded[1], trusted, recorded[0].guard.panic)


def guarded(
    rules: EnvRules, state: EnvState, measured: Measurements
) -> tuple[EnvState, Measurements]:
    """What `guard_` does to the env state; there are no weights to be restored."""
    state, _ = watch(state, measured.val_loss, rules.setup.shape.num_classes, rules.governor)
    return state, discard_panicked(measured, state)


def play_state(
    rules: EnvRules,
    num_envs: int,
    seed: int,
    agent: Agent | None = None,
    device: torch.device = CPU,
) -> Iterator[EnvStep]:
    """One episode of N envs on made-up measurements; random legal play where no agent is given."""
    player = agent or RandomPolicy()
    memory = player.start(num_envs, device)
    state = initial_state(rules, num_envs, device)
    modes = {REWARD_MODE: rules.reward.config.mode}
    values = tuple(values_of_envs(modes, rules.kernel_settings, 0, 0, num_envs).values())
    for step in range(rules.max_steps):
        step_seed = seed * 100_003 + step
        nothing = torch.zeros_like(state.slots.newborn)
        before = state.replace(slots=state.slots.replace(newborn=nothing, fresh_momentum=nothing))
        measured = made_up(rules, before, step_seed)
        before, trusted = guarded(rules, before, measured)
        recorded = record_and_observe(rules, before, trusted, values)
        observed = observed_of(recorded, trusted, step_seed)
        decision, memory = player.act(observed.view, memory)
        result = apply_action(rules, *recorded[:2], decision.action, values)
        yield EnvStep(measured, before, observed, decision.action, result)
        state = result.state
