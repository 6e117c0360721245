"""Tries what decides as CUDA graphs before a run replays it: state machine, policy and gradient
steps, on its shapes.

A few env-steps and gradient steps are played in which every call is made twice, as it is written
and as a kept step; who plays, learns and grows is the trial's own. Called by build.py with the
rules of a run, and by check_device.py.
"""

import gc
import io
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_leaves

from esper_soa.agent.policy import CapturedPolicy, RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config import TrainConfig
from esper_soa.env.step import Rules, StepKernels
from esper_soa.env.world import Sizes, World
from esper_soa.errors import UserError, fault_in_words
from esper_soa.nets.config import DataConfig
from esper_soa.nets.data import ImageCutter
from esper_soa.nets.datasets import synthetic
from esper_soa.nets.engine import (
    Choice,
    NetsConfig,
    TrainingFeed,
    TrainReport,
    ValidationFeed,
    ValidationReport,
    WorkSizes,
)
from esper_soa.nets.graphs import (
    GRADIENTS,
    POLICY,
    STATE,
    CapturedCall,
    Replay,
    StepCache,
    copy_all_,
    settled_replay,
)
from esper_soa.nets.pools import ActiveSeeds, SlotSeeds, read_active_seeds, upload
from esper_soa.nets.seed_plan import training_plan
from esper_soa.nets.streams import VALIDATION_SET, stream_keys, uniform
from esper_soa.nets.subsets import jobs_of, max_rows
from esper_soa.nets.trial import FAULTS, PASSES, SEED, TIMED, now, release
from esper_soa.nets.verdicts import device_facts, keep_verdict, kept_verdict, key_of, sources_digest
from esper_soa.ops.collect import Episode, Player, Round
from esper_soa.ops.progress import Progress
from esper_soa.registry import is_reference
from esper_soa.state import STATE_FLOAT, GradientStats
from esper_soa.telemetry.recorder import NoRecorder

# A replay launches what was recorded, so it mostly gives the same bits; sums that a GPU adds up in
# any order, as in the gradient of an embedding, do not. Stale or lost results are off by about 1.
TOLERANCE = 1e-4  # of a tensor of floats, relative to its norm
LEAST_NORM = 1e-2  # below it, as of a divergence near 0, differences count as if the norm were this
BREAKDOWN = 3  # the env-step, from 0, in which the first env loses its way
PACKAGE = Path(__file__).parents[1]
# Settings that decide what is computed, or in which shapes.
DECIDING = (
    "envs",
    "steps",
    "slots",
    "max_seeds",
    "task",
    "reward",
    "lifecycle",
    "gates",
    "signals",
    "governor",
    "early_stop",
    "attribution",
    "policy",
)
MakeSteps = Callable[[], StepCache[CapturedCall]]


class TriedPart(NamedTuple):
    """What became of one of graphs.PARTS."""

    name: str
    dropped: str = ""  # why a run goes on without; "" where it is replayed
    # Of a replayed call from the call as it is written, relative; of the worst tensor.
    apart: float = math.nan
    seconds: float = math.nan  # replayed: of an env-step of all envs, or of a gradient step
    as_written: float = math.nan  # seconds of the same without
    memory: int = 0  # bytes that it took from the device; 0 where the device does not say

    def words(self) -> str:
        """One clause for logs."""
        if self.dropped:
            return f"{self.name}: left out, as {self.dropped}"
        return (
            f"{self.name}: {1e3 * self.seconds:.2f} ms replayed, {1e3 * self.as_written:.2f} "
            "ms as written"
        )


class ComparedSteps(StepCache[CapturedCall]):
    """Makes every call as it is written and as a step of `kept`, and gives what the first came to.

    What a call changes in place, `changed`, stands after it as the first left it.
    """

    def __init__(
        self, kept: StepCache[CapturedCall], changed: Sequence[Tensor], device: torch.device
    ) -> None:
        super().__init__(capture=False)
        self.kept = kept
        self.changed = [tensor.detach() for tensor in changed]
        self.device = device
        self.dropped = ""
        self.apart = 0.0
        self.memory = 0
        # as written and replayed, by step
        self.times = defaultdict[Hashable, list[tuple[float, float]]](list)

    def run_(self, key: Hashable, fresh: CapturedCall, variants: Sequence[int]) -> CapturedCall:
        """As it is written, and as a kept step until one of them fails."""
        written = CapturedCall(fresh.function, fresh.arguments, fresh.spec)
        before = [tensor.clone() for tensor in self.changed]
        begun = now(self.device)
        written.step_(0)
        took = now(self.device) - begun
        if not self.dropped:
            after = [tensor.clone() for tensor in self.changed]
            copy_all_(self.changed, before)
            try:
                replayed = self._compare_(
                    key, fresh, variants, [*tree_leaves(written.given), *after]
                )
                self.times[key].append((took, replayed))
            except FAULTS as error:
                self.dropped = fault_in_words(error)
            copy_all_(self.changed, after)
        return written

    def keeps(self, key: Hashable) -> bool:
        """As the kept steps."""
        return self.kept.keeps(key)

    def _compare_(
        self, key: Hashable, fresh: CapturedCall, variants: Sequence[int], wanted: list[Tensor]
    ) -> float:
        """Make the call as a kept step and see whether it comes to what is `wanted`; gives the
        seconds it took.
        """
        held = _reserved(self.device)
        begun = now(self.device)
        given = self.kept.run_(key, fresh, variants).given
        took = now(self.device) - begun
        self.memory += max(_reserved(self.device) - held, 0)
        self.apart = max(self.apart, distance([*tree_leaves(given), *self.changed], wanted))
        if self.apart > TOLERANCE:
            off = f"{self.apart:.1e} from those as written, and {TOLERANCE:.0e} is rounding"
            self.dropped = f"its results are {off}"
        return took

    def verdict(self, name: str) -> TriedPart:
        """What the calls came to."""
        if self.dropped or not self.times:
            return TriedPart(name, self.dropped or "nothing of it was tried")
        quickest = [
            [min(column) for column in zip(*calls[-TIMED:], strict=True)]
            for calls in self.times.values()
        ]
        as_written, seconds = (sum(column) for column in zip(*quickest, strict=True))
        return TriedPart(name, "", self.apart, seconds, as_written, self.memory)


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """How far apart tensors are, relative to their norm, at the worst; infinite for other integers,
    flags or NaN.
    """
    apart = [torch.zeros((), dtype=STATE_FLOAT)]
    for one, right in zip(found, wanted, strict=True):
        same = (one == right) | (one.isnan() & right.isnan())
        if not one.is_floating_point():
            worst = torch.where(same.all(), 0.0, math.inf)
        else:
            off = torch.linalg.vector_norm(torch.where(same, 0, one - right), dtype=STATE_FLOAT)
            norm = torch.linalg.vector_norm(right.nan_to_num(0.0, 0.0, 0.0), dtype=STATE_FLOAT)
            worst = off / norm.clamp(min=LEAST_NORM)
        apart.append(worst.cpu().to(STATE_FLOAT))
    return float(torch.stack(apart).nan_to_num(nan=math.inf, posinf=math.inf).max())


class MadeUp:
    """An engine that trains nothing: measurements of the seeds that there are, from random
    numbers.
    """

    def __init__(self, chosen: Choice, cut: ImageCutter) -> None:
        self.chosen = chosen
        self.cut = cut
        self.draws = 0
        self.passes = 0

    def kept_bytes(self, nets: NetsConfig, work: WorkSizes, device: torch.device) -> int:
        """Nothing."""
        return 0

    def claim_(
        self, nets: NetsConfig, weights: TensorDict, seeds: SlotSeeds, keys: Tensor
    ) -> ActiveSeeds:
        """The seeds on the host; weights of newborn ones stay what they are."""
        return read_active_seeds(seeds)

    def train_(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: TrainingFeed,
        num_batches: int,
        lr_factor: float = 1.0,
    ) -> TrainReport:
        """Losses, accuracies and gradients as they might be."""
        plan = training_plan(active_seeds, nets.detached_stages)
        measured = upload(plan.measured & plan.running, alpha.device)
        health = torch.where(measured, self._drawn(alpha), 0.0)
        no = torch.zeros_like(measured)
        gradients = GradientStats(
            l2=torch.where(measured, self._drawn(alpha), 0.0),
            health=health,
            vanishing=measured & (health < 0.1),
            exploding=no,
            ratio=torch.where(measured, self._drawn(alpha), 0.0),
            measured=measured,
            batch_size=alpha.shape,
        )
        return TrainReport(
            0.5 + self._drawn(alpha[:, 0]), 100 * self._drawn(alpha[:, 0]), gradients
        )

    def validate(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationFeed,
    ) -> ValidationReport:
        """Accuracies of all subset rows as they might be; the loss of the first env is NaN once."""
        num_envs, num_slots = alpha.shape
        rows = np.full((num_envs, max_rows(num_slots, nets.rows)), -1)
        for job in jobs_of(active_seeds, range(num_slots), nets.rows, num_envs):
            rows[job.envs, : len(job.codes)] = job.codes
        loss = 0.5 + self._drawn(alpha[:, 0])
        subset = upload(rows, alpha.device)
        if self.passes == BREAKDOWN:
            loss[0] = math.nan
        self.passes += 1
        accuracy = torch.where(subset >= 0, 100 * self._drawn(subset), 0.0)
        return ValidationReport(loss, accuracy, subset, upload(active_seeds.ablated, alpha.device))

    def _drawn(self, like: Tensor) -> Tensor:
        """float64 in [0, 1) of the shape of `like`, others at every call."""
        self.draws += 1
        places = torch.arange(like.numel(), device=like.device)
        keys = stream_keys(SEED, VALIDATION_SET, (self.draws,), places)
        return uniform(keys, torch.zeros_like(places), STATE_FLOAT).view(like.shape)


class AskingRecorder(NoRecorder):
    """Records nothing, and asks for all probabilities where a run would (telemetry.level=full)."""

    def __init__(self, full: bool) -> None:
        self.full = full


def _reserved(device: torch.device) -> int:
    """Bytes that torch has taken from the device; 0 where it does not say."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def choose_replay(
    cfg: TrainConfig, rules: Rules, kernels: StepKernels, num_ranks: int = 1
) -> Replay:
    """What of the decisions of a run is replayed; its rules and kernels are those of one of
    `num_ranks`.

    Raises SettingError where the settings insist on what cannot be.
    """
    settled = settled_replay(cfg.compute.cuda_graphs, rules.blueprints.device)
    return weighed_replay(cfg, rules, kernels, num_ranks) if settled is None else settled


def weighed_replay(
    cfg: TrainConfig, rules: Rules, kernels: StepKernels, num_ranks: int = 1
) -> Replay:
    """What holds when it is tried, now or at an earlier run of the same kind."""
    own = any(map(is_reference, (cfg.task.host, *cfg.task.blueprints, *cfg.reward.modes)))
    key = verdict_key(cfg, rules.blueprints.device, num_ranks)
    # what a user's own part computes is in no key
    found = None if own else kept_verdict(key, TriedPart)
    when = "found at an earlier run"
    if found is None:
        found = tried_parts(cfg, rules, kernels, num_ranks)
        kept = "not kept, for parts of your own" if own else keep_verdict(key, found)
        when = f"tried now; {kept}" if kept else "tried now"
    parts = tuple(one.name for one in found if not one.dropped)
    tried = tuple(one.words() for one in found if not one.dropped)
    dropped = tuple(one.words() for one in found if one.dropped)
    reason = f"replayed as CUDA graphs: {', '.join(parts) or 'nothing'} ({when})"
    return Replay(parts, reason, tried, dropped, insists=False)


def tried_parts(
    cfg: TrainConfig, rules: Rules, kernels: StepKernels, num_ranks: int
) -> list[TriedPart]:
    """What becomes on this GPU of every part that the run has; those that are not tried as well."""
    own = any(map(is_reference, cfg.reward.modes))
    obstacles = {STATE: "a reward of your own may do what a graph does not do again" if own else ""}
    if cfg.policy.name == "ppo":
        obstacles |= {POLICY: "", GRADIENTS: "ranks take them together" if num_ranks > 1 else ""}
    wanted = [name for name, reason in obstacles.items() if not reason]
    left_out = [TriedPart(name, reason) for name, reason in obstacles.items() if reason]
    device = rules.blueprints.device
    return (
        try_replay(cfg, rules, kernels, wanted, lambda: StepCache(capture=True, device=device))
        + left_out
    )


def verdict_key(cfg: TrainConfig, device: torch.device, num_ranks: int) -> str:
    """What a verdict holds for."""
    settings = asdict(cfg)
    deciding = (
        [settings[name] for name in DECIDING],
        cfg.compute.compile,
        cfg.telemetry.level,
        num_ranks > 1,
    )
    return key_of((*device_facts(device), torch.__version__, sources_digest(PACKAGE), deciding))


def try_replay(
    cfg: TrainConfig, rules: Rules, kernels: StepKernels, parts: Sequence[str], make: MakeSteps
) -> list[TriedPart]:
    """What became of each of `parts`; `make` makes what keeps its steps.

    Nothing of the run is used but its rules and kernels, which do not change, and torch's random
    numbers go on as if nothing had been drawn. Raises UserError where the device is of no use any
    more.
    """
    device = rules.blueprints.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            found = _tried(cfg, rules, kernels, parts, make)
        except (*FAULTS, UserError) as error:
            found = [TriedPart(name, f"the trial fails: {fault_in_words(error)}") for name in parts]
    gc.collect()  # kept steps hold what holds them
    release(device, "compute.cuda_graphs=auto: the trial of graphs", "compute.cuda_graphs=off")
    return found


def _tried(
    cfg: TrainConfig, rules: Rules, kernels: StepKernels, parts: Sequence[str], make: MakeSteps
) -> list[TriedPart]:
    device = rules.blueprints.device
    engine = MadeUp(rules.engine.chosen, rules.engine.cut)
    world = World(
        rules._replace(engine=engine),
        synthetic(2, 2, device),
        Sizes(cfg.envs, 1, 1, 1),
        DataConfig(),
        SEED,
    )
    world.kernels = kernels
    player = _player(cfg, world)
    compared = dict[str, ComparedSteps]()
    if STATE in parts:
        leaves = [leaf for leaf in world.weights.values(True, True) if isinstance(leaf, Tensor)]
        compared[STATE] = ComparedSteps(make(), leaves, device)
        world.kernels = kernels._replace(steps=compared[STATE])
    if POLICY in parts and player.learner is not None:
        compared[POLICY] = ComparedSteps(make(), [], device)
        player = player._replace(agent=CapturedPolicy(player.learner.policy, compared[POLICY]))
    rollout = _played(world, player, cfg.telemetry.level == "full")
    if GRADIENTS in parts and player.learner is not None and rollout is not None:
        compared[GRADIENTS] = ComparedSteps(make(), player.learner.parameters, device)
        player.learner.steps = compared[GRADIENTS]
        _learn_(player.learner, rollout)
    return [compared[name].verdict(name) for name in parts]


def _player(cfg: TrainConfig, world: World) -> Player:
    """A policy like that of the run, or random play where it is another."""
    if cfg.policy.name != "ppo":
        return Player(RandomPolicy(), None)
    shape = world.rules.nets.shape
    ppo = cfg.policy.ppo
    imitation = cfg.policy.imitation
    policy = RecurrentPolicy(cfg.policy, shape.slots, SEED, len(world.rules.blueprints)).to(
        world.device
    )
    learner = Learner(policy, ppo, ppo.floor_penalty_rounds, SEED, None, imitation)
    return Player(policy, learner, RandomPolicy() if imitation.rounds else None)


def _played(world: World, player: Player, full: bool) -> Rollout | None:
    """The beginning of an episode, of several where they are short: PASSES env-steps, told again up
    to its length.

    full: as many again in which every decision is told with all probabilities.
    """
    steps = world.rules.max_steps
    quiet = Progress(1, Console(file=io.StringIO()), "off")
    rounds = -(-PASSES // steps)
    for number in range(2 * rounds if full else rounds):
        episode = Episode(
            world, player, Round(number, quiet, recorder=AskingRecorder(number >= rounds))
        )
        for _ in range(min(steps, PASSES)):
            episode.step_()
    rollout = episode.rollout
    if rollout is None:
        return None
    again = torch.arange(steps, device=world.device) % PASSES
    rows = rollout.rows[again]
    taught = None if rollout.taught is None else rollout.taught[again]
    return Rollout(rows.replace(reset=torch.zeros_like(rows.reset)), rollout.bootstrap, taught)


def _learn_(learner: Learner, rollout: Rollout) -> None:
    """PASSES gradient steps or more, of every kind that the run takes."""
    minibatches = learner.config.minibatches
    if rollout.taught is not None:
        for _ in range(-(-PASSES // (learner.imitation.epochs * minibatches))):
            learner.imitate(rollout)
    for _ in range(-(-PASSES // (learner.config.epochs * minibatches))):
        learner.update(rollout)
