"""The main job: build everything from the settings, then collect, update, log and save, round by round.

Called by train.py with checked settings and a run folder. A round is one episode of every env followed by one policy
update; scripted policies go through the same rounds without the update.
"""

import sys
import time

import torch
from rich.console import Console

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.scripted import WaitPolicy, scripted_policy
from esper_soa.config import TrainConfig
from esper_soa.env.observation import feature_names
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.step import EAGER, Rules, compiled
from esper_soa.env.world import Sizes, World
from esper_soa.nets.blueprints import blueprint_codes
from esper_soa.nets.config import enabled_slots
from esper_soa.nets.datasets import load_images
from esper_soa.nets.host import host_shape
from esper_soa.nets.pools import parameter_table
from esper_soa.nets.supervised import NetsConfig
from esper_soa.ops.checkpoint import save_checkpoint
from esper_soa.ops.collect import Player, play_round
from esper_soa.ops.device import apply_threads, choose_env_chunk, device_name, resolve_device
from esper_soa.ops.progress import LOGGER, Progress, logging_to
from esper_soa.ops.report import HostScore, SeedCounts, Speed, Summary, print_summary, write_summary
from esper_soa.ops.rundir import RunFolder, write_versions
from esper_soa.ops.tally import RoundResult
from esper_soa.ops.telemetry import Json, MetricsWriter
from esper_soa.vocabulary import NUM_BLUEPRINTS, STAGE_NAMES

EVAL_BATCH = 128  # validation images per forward pass


def build_rules(cfg: TrainConfig, device: torch.device) -> Rules:
    """Everything that stays the same during a run, on `device`."""
    slots = enabled_slots(cfg.task, list(cfg.slots))
    shape = host_shape(cfg.task, slots)
    detached = tuple(STAGE_NAMES.index(stage) for stage in cfg.lifecycle.detached_stages)
    chunk = choose_env_chunk(cfg.compute.env_chunk, cfg.envs, device)
    allowed = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    allowed[list(blueprint_codes(list(cfg.task.blueprints)))] = True
    rank = torch.tensor([shape.execution_order.index(slot) for slot in range(len(slots))])
    return Rules(
        nets=NetsConfig(shape, cfg.task, detached, chunk, EVAL_BATCH),
        lifecycle=cfg.lifecycle,
        gates=cfg.gates,
        signals=cfg.signals,
        governor=cfg.governor,
        reward=RewardSettings(cfg.reward, parameter_table(shape, device), cfg.steps),
        blueprints=allowed.to(device),
        execution_rank=rank.to(device),
        max_seeds=cfg.max_seeds,
    )


def build_world(cfg: TrainConfig, device: torch.device) -> World:
    """N envs with weights and data; raises SettingError or DataError for what does not fit together."""
    images = load_images(cfg.data, device)
    sizes = Sizes(cfg.envs, cfg.batch_size, cfg.train_samples, cfg.val_samples)
    kernels = compiled() if cfg.compute.compile else EAGER
    return World(build_rules(cfg, device), images, sizes, cfg.data, cfg.seed, kernels)


def build_player(cfg: TrainConfig, world: World) -> Player:
    """The decision maker that `policy.name` asks for."""
    if cfg.policy.name != "ppo":
        return Player(scripted_policy(cfg.policy, cfg.task.blueprints), None)
    names = tuple(spec.name for spec in world.rules.nets.shape.slots)
    policy = RecurrentPolicy(cfg.policy, len(names), len(feature_names(names)), cfg.seed).to(world.device)
    return Player(policy, Learner(policy, cfg.policy.ppo, cfg.rounds, cfg.seed))


class Run:
    """A run in progress: what is built once, and what adds up over rounds."""

    def __init__(self, cfg: TrainConfig, folder: RunFolder) -> None:
        self.cfg, self.folder = cfg, folder
        self.started = time.monotonic()
        apply_threads(cfg.compute.threads)
        self.device = resolve_device(cfg.device)
        self.world = build_world(cfg, self.device)
        self.player = build_player(cfg, self.world)
        self.seeds = {"germinated": 0, "blended": 0, "fossilized": 0, "pruned": 0}
        self.seconds, self.rows, self.rounds_done = 0.0, 0.0, 0
        images = self.world.images
        data = {"name": images.name, "source": images.source, "identity": images.identity}
        write_versions(folder, device_name(self.device), data)

    def announce(self) -> None:
        """Say what will be done, on which data and device."""
        cfg, world = self.cfg, self.world
        sizes, slots = world.sizes, ", ".join(spec.name for spec in world.rules.nets.shape.slots)
        LOGGER.info("data     %s: %s", world.images.name, world.images.source)
        LOGGER.info("hosts    %d x %s, %d parameters each, slots %s", sizes.num_envs, cfg.task.name,
                    world.rules.reward.counts.host, slots)  # fmt: skip
        LOGGER.info("work     %d rounds of %d env-steps; T=%d training and V=%d validation images, batches of %d",
                    cfg.rounds, cfg.steps, sizes.train_samples, sizes.val_samples, sizes.batch_size)  # fmt: skip
        LOGGER.info("policy   %s, reward %s, on %s", cfg.policy.name, cfg.reward.mode, device_name(self.device))

    def one_round(self, number: int, progress: Progress) -> tuple[RoundResult, dict[str, Json]]:
        """Collect and update; returns the round and its line for metrics.jsonl."""
        begun = time.monotonic()
        result, rollout = play_round(self.world, self.player, number, progress, f"round {number + 1}/{self.cfg.rounds}")
        collected = time.monotonic()
        update: dict[str, float] = {}
        if self.player.learner is not None and rollout is not None:
            update = self.player.learner.update(rollout)
        ended = time.monotonic()
        env_steps = self.cfg.envs * self.cfg.steps
        self.seconds += ended - begun
        self.rows += result.alpha_rows
        self.rounds_done += 1
        for name in self.seeds:
            self.seeds[name] += result.seeds[name]
        line: dict[str, Json] = {"round": number + 1, "env_steps": (number + 1) * env_steps}
        line |= result.record
        line |= {"eps": env_steps / (ended - begun), "collect_seconds": collected - begun,
                 "update_seconds": ended - collected, "update": update}  # fmt: skip
        return result, line

    def save(self, number: int) -> None:
        """Write the checkpoint after round `number` (from 0)."""
        content: dict = {"rounds_done": number + 1, "policy": self.cfg.policy.name, "slots": list(self.cfg.slots)}
        if self.player.learner is not None:
            content["learner"] = self.player.learner.state_dict()
        save_checkpoint(self.folder.checkpoint, content)

    def control(self, number: int, progress: Progress) -> HostScore | None:
        """The hosts of round `number` on the same data, without growth."""
        if not self.cfg.baseline_comparison:
            return None
        result, _ = play_round(self.world, Player(WaitPolicy(), None), number, progress, "without growth")
        return HostScore(result.accuracies, result.parameters)

    def summarise(self, last: RoundResult, control: HostScore | None) -> Summary:
        """What the final table says."""
        cfg, sizes = self.cfg, self.world.sizes
        env_steps = self.rounds_done * cfg.envs * cfg.steps
        return Summary(
            name=cfg.name,
            task=cfg.task.name,
            policy=cfg.policy.name,
            data=f"{self.world.images.name} ({self.world.images.source})",
            device=device_name(self.device),
            envs=cfg.envs,
            rounds=cfg.rounds,
            steps=cfg.steps,
            grown=HostScore(last.accuracies, last.parameters),
            control=control,
            seeds=SeedCounts(**self.seeds),
            reward=sum(last.rewards) / len(last.rewards),
            speed=Speed(env_steps, self.seconds, sizes.train_samples, sizes.val_samples, self.rows / self.rounds_done),
            wall_seconds=time.monotonic() - self.started,
        )


def run(cfg: TrainConfig, folder: RunFolder) -> Summary:
    """Run the whole job in `folder`; returns what the final table says."""
    console = Console(file=sys.stdout)
    with logging_to(folder.log, console):
        job = Run(cfg, folder)
        job.announce()
        total = cfg.envs * cfg.steps * (cfg.rounds + int(cfg.baseline_comparison))
        shown = Progress(total, console, cfg.telemetry.progress, cfg.telemetry.plain_interval)
        with shown as progress, MetricsWriter(folder.metrics) as metrics:
            for number in range(cfg.rounds):
                result, line = job.one_round(number, progress)
                metrics.write(line)
                if cfg.checkpoint_every and (number + 1) % cfg.checkpoint_every == 0:
                    job.save(number)
            job.save(cfg.rounds - 1)
            control = job.control(cfg.rounds - 1, progress)
        summary = job.summarise(result, control)
        write_summary(summary, folder.summary)
        print_summary(summary, console)
        LOGGER.info("files    %s", folder.path)
    return summary
