"""The sides of a benchmark at the same declared work: the engine in its real cycle, and its
opponents.

Every `run` is one timing. All sides see the same images, and seeds stay as they were put: the
actions are WAIT, though the engine's policy decides at every env-step; unless seeds are to grow.
"""

import io
import time
from dataclasses import replace

import torch
from rich.console import Console

from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import count_syncs, wait_for
from benchmarks.opponents import LoopSide
from benchmarks.timing import COLUMNS, LIVE_ALPHA, BenchmarkError, Timing, in_columns
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.agent.rollout import Rollout
from esper_soa.env.step import EAGER
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.state import Decision, EnvState, View
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.profile import PhaseProfile
from esper_soa.training.results.progress import Progress
from esper_soa.vocabulary import BLUEPRINT_NAMES, AlphaMode, Op, Stage


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
    """A fresh state with the declared live seeds in it, newly born and at a standing alpha."""
    live = torch.arange(cfg.num_slots, device=state.slots.stage.device) < cfg.live
    live = live.expand_as(state.slots.stage)
    alphas = torch.where(live, LIVE_ALPHA, state.slots.alpha)
    slots = state.slots.replace(
        stage=torch.where(live, Stage.BLENDING, state.slots.stage),
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
        self.cfg = cfg
        self.device = resolve_device(cfg.device)
        train = train_config(cfg)
        if cfg.compute.compile == "auto" and self.device.type == "cpu":
            # as at the second start of a run, before which step kernels were compiled
            train = replace(train, compute=replace(cfg.compute, compile="on"))
        self.threads = apply_threads(self.cfg.compute.threads)
        self.world = build_world(train, self.device)
        player = build_player(train.policy, self.world)
        self.agent = player.agent
        self.learner = player.learner
        self.player = player if cfg.grow else Player(Waiting(player.agent), player.learner)
        self.profile = PhaseProfile(self.device)
        self.step_seconds = list[float]()  # of every timed env-step of all envs, as the host saw it

    def warm_up(self) -> None:
        """Fresh hosts, the first env-steps, and a rollout to learn from."""
        apply_threads(self.cfg.compute.threads)
        begun = time.perf_counter()
        self.profile.take()
        self.begin()
        self.reset = sum(self.profile.take().values())  # fresh hosts, shared out over the episode
        self._play(self.cfg.warmup)
        self.first_seconds = time.perf_counter() - begun
        self.update_rows = self._whole_rollout() if self.cfg.update else None

    def run(self) -> Timing:
        """A few env-steps of all envs, then one update, a share of which counts."""
        apply_threads(self.cfg.compute.threads)
        if self.step + self.cfg.timed_steps > self.cfg.steps:
            self.begin()
        wait_for(self.device)
        self.profile.take()
        begun = time.perf_counter()
        self._play(self.cfg.timed_steps)
        seconds = (time.perf_counter() - begun) / self.cfg.timed_steps
        phases = {
            phase: spent / self.cfg.timed_steps for phase, spent in self.profile.take().items()
        }
        columns = in_columns(phases, seconds)
        columns[COLUMNS[2]] += self.reset / self.cfg.steps
        if self.update_rows is not None:
            columns["update"] = phases["update"] = self._update_seconds() / self.cfg.steps
        self.check()
        return Timing(columns, phases)

    def check(self) -> None:
        """Raise BenchmarkError unless all seeds are in place and every subset was evaluated; where
        they grow, unless some do.
        """
        slots = self.episode.env.state.slots
        blending = int((slots.stage == Stage.BLENDING).sum())
        live = int(slots.live.sum())
        if self.cfg.grow:
            if live == 0:
                raise BenchmarkError("engine: no seed grows by the policy")
            return
        wanted = self.cfg.envs * self.cfg.live
        if (blending, live) != (wanted, wanted):
            raise BenchmarkError(
                f"engine: {live} seeds are live and {blending} blending, not {wanted}"
            )
        if self.val_images() != self.cfg.images[1]:
            raise BenchmarkError(
                f"engine: {self.val_images()} validation images per env-step, not "
                f"{self.cfg.images[1]}"
            )

    def facts(self) -> dict[str, object]:
        """Layout and the first env-step, which pays for compilation and first calls."""
        nets = self.world.rules.setup
        return {
            "threads": self.threads,
            "env_chunk": nets.env_chunk,
            "workers": nets.workers,
            "eval_batch": nets.eval_batch,
            "dtype": str(nets.precision).removeprefix("torch."),
            "train_images": self.world.setup.train_samples * self.cfg.envs * self.cfg.targets,
            "val_images": self.val_images(),
            "rows": self.cfg.rows,
            "warmup_seconds": self.first_seconds,
            "kernels": self.world.rules.engine.chosen.reason,
            "state": self.world.kernels.reason.split(":")[0],  # without the folder
        }

    def val_images(self) -> int:
        """Validation images times subset rows of an env-step of all envs, as counted."""
        rows = float(self.episode.metrics.sums.rows) / self.step
        return round(rows * self.world.setup.val_samples * self.cfg.targets)

    def one_step(self) -> None:
        """Another env-step of all envs, for those who count something in it."""
        if self.step + 1 > self.cfg.steps:
            self.begin()
        self._play(1)

    def step_times(self, number: int) -> list[float]:
        """Seconds of so many more env-steps of all envs, each by itself."""
        for _ in range(number):
            self.one_step()
        return self.step_seconds[-number:]

    def syncs(self) -> int:
        """Waits for the device in an env-step; what is compiled cannot be watched."""
        kernels = self.world.kernels
        self.world.kernels = EAGER
        found = count_syncs(self.one_step, self.device)
        self.world.kernels = kernels
        return found

    def begin(self) -> None:
        """Fresh hosts, whose seeds are born in the next env-step."""
        quiet = Progress(self.cfg.envs * self.cfg.steps, Console(file=io.StringIO()), "off")
        self.episode = EpisodeRunner(self.world, self.player, Round(0, quiet, profile=self.profile))
        self.step = 0
        if not self.cfg.grow:
            self.episode.env.state = planted(self.episode.env.state, self.cfg)

    def _play(self, steps: int) -> None:
        for _ in range(steps):
            begun = time.perf_counter()
            self.episode.step_()
            self.step += 1
            self.step_seconds.append(time.perf_counter() - begun)
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
            raise BenchmarkError(
                f"engine: {report['steps']:g} gradient steps in an update, not {wanted}"
            )
        return seconds


def make_side(name: str, cfg: EpsConfig) -> EngineSide | LoopSide:
    """The side of that name."""
    return EngineSide(cfg) if name == "engine" else LoopSide(name, cfg)
