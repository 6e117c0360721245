"""The two sides of a benchmark at the same declared work: the engine in its real cycle, and the plain loop.

Built by benchmarks/eps.py from its settings; every `run` is one timing. Both sides see the same images, and seeds stay
as they were put: the actions are WAIT, though the engine's policy decides at every env-step.
"""

import io
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.baseline_loop import LIVE_ALPHA, Crops, LoopData, Workload, env_step, make_envs, shuffled_batches
from benchmarks.eps_config import EpsConfig, cores, train_config
from benchmarks.machine import wait_for
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.agent.rollout import Rollout
from esper_soa.env.step import EAGER
from esper_soa.errors import UserError
from esper_soa.nets.datasets import load_images
from esper_soa.nets.native import switch
from esper_soa.ops.collect import Episode, Player
from esper_soa.ops.device import apply_threads, keep_freed_memory, resolve_device
from esper_soa.ops.profile import PhaseProfile
from esper_soa.ops.progress import Progress
from esper_soa.state import Decision, EnvState, View
from esper_soa.trainer import build_player, build_world
from esper_soa.vocabulary import BLUEPRINT_NAMES, STAGE_NAMES, AlphaMode, Op, Stage

TRIALS = 8  # env-steps per option of the plain loop, of which the quickest counts: one slow moment decides nothing
COLUMNS = ("training", "validation", "policy and state machine", "update")
PARTS = {"training": "training", "data": "training", "validation": "validation"}  # column of a phase; else the third


class BenchmarkError(UserError):
    """The two sides did not do the work that was declared."""


class Timing(NamedTuple):
    """One timing, in seconds per env-step of all envs."""

    columns: dict[str, float]  # by COLUMNS, not cumulative; those that the side does not have are absent
    phases: dict[str, float]

    @property
    def total(self) -> float:
        """Everything that the side does."""
        return sum(self.columns.values())


class Waiting:
    """An agent that decides as the one inside and then does nothing."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Of the agent inside."""
        return self.agent.start(num_envs, device)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The decision of the agent inside, its op replaced by WAIT."""
        decision, memory = self.agent.act(view, memory)
        wait = torch.full_like(decision.action.op, Op.WAIT)
        return decision.replace(action=decision.action.replace(op=wait)), memory


def planted(state: EnvState, cfg: EpsConfig) -> EnvState:
    """A fresh ledger with the declared live seeds in it, newly born and at a standing alpha."""
    stage = STAGE_NAMES.index(cfg.stage)
    alpha = {Stage.TRAINING: 0.0, Stage.BLENDING: LIVE_ALPHA}.get(stage, 1.0)
    device = state.slots.stage.device
    live = (torch.arange(cfg.envs, device=device) < cfg.live_envs)[:, None]
    live = live & (torch.arange(cfg.num_slots, device=device) < cfg.live)
    alphas = torch.where(live, alpha, state.slots.alpha)
    slots = state.slots.replace(
        stage=torch.where(live, stage, state.slots.stage),
        blueprint=torch.where(live, BLUEPRINT_NAMES.index(cfg.blueprint), state.slots.blueprint),
        alpha=alphas,
        newborn=live,
        fresh_momentum=live,
    )
    hold = torch.full_like(state.ramp.mode, AlphaMode.HOLD)
    ramp = state.ramp.replace(alpha=alphas, start=alphas, target=alphas, mode=hold)
    return state.replace(slots=slots, ramp=ramp)


class EngineSide:
    """World, recurrent policy, rollout and learner, as in a run."""

    name = "engine"

    def __init__(self, cfg: EpsConfig) -> None:
        """Builds everything; `warm_up` must come before the first timing."""
        self.cfg, train = cfg, train_config(cfg)
        self.device = resolve_device(cfg.device)
        self.threads = self._take_threads()
        self.world = build_world(train, self.device)
        player = build_player(train, self.world)
        self.waiting, self.learner = Waiting(player.agent), player.learner
        self.player = Player(self.waiting, player.learner)
        self.profile = PhaseProfile(self.device)

    def warm_up(self) -> None:
        """Fresh hosts, the first env-steps, and a rollout to learn from."""
        self._take_threads()
        begun = time.perf_counter()
        self.profile.take()
        self._begin()
        self.reset = sum(self.profile.take().values())  # fresh hosts, shared out over the episode
        self._play(self.cfg.warmup)
        self.first_seconds = time.perf_counter() - begun
        self.update_rows = self._whole_rollout() if self.cfg.update else None

    def run(self) -> Timing:
        """A few env-steps of all envs, then one update, a share of which counts."""
        self._take_threads()
        if self.step + self.cfg.timed_steps > self.cfg.steps:
            self._begin()
        wait_for(self.device)
        self.profile.take()
        begun = time.perf_counter()
        self._play(self.cfg.timed_steps)
        seconds = (time.perf_counter() - begun) / self.cfg.timed_steps
        phases = {phase: spent / self.cfg.timed_steps for phase, spent in self.profile.take().items()}
        columns = in_columns(phases, seconds)
        columns["policy and state machine"] += self.reset / self.cfg.steps
        if self.update_rows is not None:
            columns["update"] = phases["update"] = self._update_seconds() / self.cfg.steps
        self.check()
        return Timing(columns, phases)

    def check(self) -> None:
        """Raise BenchmarkError unless all seeds are where they were put and every subset was evaluated."""
        slots, stage = self.episode.state.slots, STAGE_NAMES.index(self.cfg.stage)
        found = int((slots.stage == stage).sum()), int(slots.live.sum())
        wanted = self.cfg.live_envs * self.cfg.live
        if found != (wanted, wanted):
            raise BenchmarkError(f"engine: {found[1]} seeds are live and {found[0]} {self.cfg.stage}, not {wanted}")
        rows = float(self.episode.tally.rows) / self.step
        if rows * self.cfg.val_samples != self.cfg.images[1]:
            raise BenchmarkError(f"engine: {rows:g} subset rows per env-step, not {self.cfg.images[1]}")

    def facts(self) -> dict[str, object]:
        """Layout and the first env-step, which pays for compilation and first calls."""
        nets = self.world.rules.nets
        return {
            "threads": self.threads, "env_chunk": nets.env_chunk, "workers": nets.workers,
            "eval_batch": nets.eval_batch, "dtype": str(nets.precision).removeprefix("torch."),
            "train_images": self.world.sizes.train_samples * self.cfg.envs, "val_images": self.val_images(),
            "rows": self.cfg.rows, "warmup_seconds": self.first_seconds, "kernels": switch.current().reason,
        }  # fmt: skip

    def val_images(self) -> int:
        """Validation images times subset rows of an env-step of all envs, as counted."""
        return round(float(self.episode.tally.rows) / self.step * self.world.sizes.val_samples)

    def one_step(self) -> None:
        """Another env-step of all envs, for those who count something in it."""
        if self.step + 1 > self.cfg.steps:
            self._begin()
        self._play(1)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Within it the state machine runs as it is written, compiled or not."""
        kernels, self.world.kernels = self.world.kernels, EAGER
        yield
        self.world.kernels = kernels

    def watch_with(self, profile: PhaseProfile) -> None:
        """Tell `profile` of the laps from now on."""
        self.profile = self.episode.profile = profile

    def _take_threads(self) -> int:
        return apply_threads(self.cfg.compute.threads)

    def _begin(self) -> None:
        quiet = Progress(self.cfg.envs * self.cfg.steps, Console(file=io.StringIO()), "off")
        self.episode, self.step = Episode(self.world, self.player, 0, quiet, "", self.profile), 0
        self.episode.state = planted(self.episode.state, self.cfg)

    def _play(self, steps: int) -> None:
        for _ in range(steps):
            self.episode.step_(self.step)
            self.step += 1
        wait_for(self.device)

    def _whole_rollout(self) -> Rollout:
        """A rollout of a whole episode, made of the env-steps played so far over and over."""
        rollout = self.episode.rollout
        if rollout is None:
            raise BenchmarkError("engine: nobody learns")
        again = torch.arange(self.cfg.steps, device=self.device) % self.step
        return Rollout(rollout.rows[again], rollout.bootstrap.clone())

    def _update_seconds(self) -> float:
        if self.learner is None or self.update_rows is None:
            raise BenchmarkError("engine: nobody learns")
        wait_for(self.device)
        begun = time.perf_counter()
        report = self.learner.update(self.update_rows)
        wait_for(self.device)
        seconds = time.perf_counter() - begun
        wanted = self.cfg.policy.ppo.epochs * self.cfg.policy.ppo.minibatches
        if report["steps"] != wanted:
            raise BenchmarkError(f"engine: {report['steps']:g} gradient steps in an update, not {wanted}")
        return seconds


class BaselineSide:
    """Ordinary modules, one env after the other; it has neither policy nor update."""

    name = "baseline"

    def __init__(self, cfg: EpsConfig) -> None:
        """Builds the envs; `warm_up` must come before the first timing."""
        self.cfg, self.device = cfg, resolve_device(cfg.device)
        self.rows = 0
        keep_freed_memory(self.device)  # as in a run of the engine
        self.profile = PhaseProfile(self.device)
        torch.manual_seed(cfg.seed)
        self.data = loop_data(cfg, self.device)
        self.work = self.workload(cfg, self.device)
        self.envs = make_envs(self.work)

    def warm_up(self) -> None:
        """Choose threads and the form of validation, then play the first env-steps."""
        self.tried = self._tune()
        for _ in range(self.cfg.warmup):
            self.one_step()

    @staticmethod
    def workload(cfg: EpsConfig, device: torch.device) -> Workload:
        """The declared work as the plain loop takes it."""
        return Workload(
            envs=cfg.envs, batch=cfg.batch_size, train=cfg.train_samples, val=cfg.val_samples, live=cfg.live,
            live_envs=cfg.live_envs, blueprint=cfg.blueprint, stage=cfg.stage, slots=tuple(cfg.slots), task=cfg.task,
            device=str(device), threads=cfg.baseline_threads or 1, validation=cfg.baseline_validation,
        )  # fmt: skip

    def run(self) -> Timing:
        """A few env-steps of all envs."""
        torch.set_num_threads(self.work.threads)
        wait_for(self.device)
        self.profile.take()
        begun = time.perf_counter()
        for _ in range(self.cfg.timed_steps):
            self.one_step()
        wait_for(self.device)
        seconds = (time.perf_counter() - begun) / self.cfg.timed_steps
        phases = {phase: spent / self.cfg.timed_steps for phase, spent in self.profile.take().items()}
        return Timing(in_columns(phases, seconds), phases)

    def one_step(self) -> None:
        """An env-step of every env."""
        self.rows = sum(env_step(env, self.work, self.data, self.profile.lap) for env in self.envs)

    def eagerly(self) -> AbstractContextManager[None]:
        """It always runs as it is written."""
        return nullcontext()

    def watch_with(self, profile: PhaseProfile) -> None:
        """Tell `profile` of the laps from now on."""
        self.profile = profile

    def facts(self) -> dict[str, object]:
        """What was chosen in the warm-up, and from what."""
        return {
            "threads": self.work.threads, "fused_validation": self.work.fused,
            "val_batch": self.work.val_batch or self.work.batch, "dtype": "float32", "tried_ms": self.tried,
            "train_images": sum(len(labels) for _, labels in self.data.train(self.cfg.batch_size)) * self.cfg.envs,
            "val_images": self.rows * self.cfg.val_samples, "rows": self.cfg.rows,
        }  # fmt: skip

    def _tune(self) -> dict[str, float]:
        """Threads first, then the form of validation: milliseconds of the first env's env-step, the better of two."""
        tried: dict[str, float] = {}
        if self.cfg.baseline_threads == 0 and self.device.type == "cpu":
            options = {f"{threads} threads": ("threads", threads) for threads in sorted({1, cores()})}
            tried |= self._try(options)
        if self.cfg.baseline_validation == "auto":
            tried |= self._try({form: ("validation", form) for form in ("separate", "fused")})
        small = 16
        if self.device.type == "cpu" and self.cfg.val_samples > small:
            sizes = {f"val_batch {size}": ("val_batch", size) for size in (self.cfg.batch_size, small)}
            tried |= self._try(sizes)
        torch.set_num_threads(self.work.threads)
        return tried

    def _try(self, options: Mapping[str, tuple[str, int | str]]) -> dict[str, float]:
        """Milliseconds by option; the quickest stays set."""
        found: dict[str, float] = {}
        for name, (setting, value) in options.items():
            setattr(self.work, setting, value)
            torch.set_num_threads(self.work.threads)
            times = []
            for _ in range(TRIALS):
                wait_for(self.device)
                begun = time.perf_counter()
                env_step(self.envs[0], self.work, self.data)
                wait_for(self.device)
                times.append(time.perf_counter() - begun)
            found[name] = 1e3 * min(times)
        setattr(self.work, *options[min(found, key=found.__getitem__)])
        return found


def loop_data(cfg: EpsConfig, device: torch.device) -> LoopData:
    """The images of the engine's run as the plain loop wants them: normalised floats in channels_last."""
    images = load_images(train_config(cfg).data, device)
    train = ready_made(images.train_images, images.mean, images.std)
    val = ready_made(images.test_images, images.mean, images.std), images.test_labels
    count = cfg.train_samples // cfg.batch_size
    if cfg.augment:
        crops = Crops(train, images.train_labels)
        return LoopData(lambda batch: crops.batches(batch, count), val)
    labels = images.train_labels
    return LoopData(lambda batch: shuffled_batches(train, labels, batch)[:count], val)


def ready_made(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalised float32 [n, 3, 32, 32] in channels_last from uint8 [n, 32, 32, 3]."""
    centre, spread = (torch.tensor(values, device=images.device) for values in (mean, std))
    return ((images / 255 - centre) / spread).permute(0, 3, 1, 2)


def in_columns(phases: dict[str, float], seconds: float) -> dict[str, float]:
    """Seconds by column; what no phase has counted belongs to the last of those that are timed here."""
    found = dict.fromkeys(COLUMNS[:3], 0.0)
    for phase, spent in phases.items():
        found[PARTS.get(phase, COLUMNS[2])] += spent
    found[COLUMNS[2]] += max(0.0, seconds - sum(phases.values()))
    return found


def make_side(name: str, cfg: EpsConfig) -> EngineSide | BaselineSide:
    """The side of that name, built."""
    return EngineSide(cfg) if name == "engine" else BaselineSide(cfg)


def ready_side(name: str, cfg: EpsConfig) -> EngineSide | BaselineSide:
    """The side of that name, warmed up."""
    side = make_side(name, cfg)
    side.warm_up()
    return side
