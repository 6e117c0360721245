"""The main job: build everything from the settings, then collect, update, log and save, round by round.

Called by train.py with checked settings and a run folder, and the checkpoint to go on from where there is one. A round
is one episode of every env followed by one policy update; scripted policies go through the same rounds without the
update. A round that is interrupted counts for nothing: the resumed run plays it again from its start.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from logging import INFO, WARNING
from pathlib import Path

import torch
from rich.console import Console

from esper_soa.agent.policy import RecurrentPolicy, StillPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.scripted import WaitPolicy, scripted_policy
from esper_soa.config import TrainConfig, settings_yaml
from esper_soa.env.attribution import prefix_codes
from esper_soa.env.observation import feature_names
from esper_soa.env.outcome import hypervolume, trade_offs
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.shapley import arrival_orders
from esper_soa.env.step import EAGER, Rules, compiled, on_fixed_memory
from esper_soa.env.world import Sizes, World
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.nets import formulations
from esper_soa.nets.blueprints import blueprint_codes
from esper_soa.nets.config import SubsetRows, enabled_slots
from esper_soa.nets.datasets import load_images
from esper_soa.nets.evaluation import EXACT_SLOTS
from esper_soa.nets.graphs import decision_cache, network_cache
from esper_soa.nets.host import host_shape
from esper_soa.nets.native import switch
from esper_soa.nets.pools import parameter_table
from esper_soa.nets.precision import choose_precision
from esper_soa.nets.supervised import NetsConfig, chunks
from esper_soa.nets.triton_kernels import switch as triton_switch
from esper_soa.ops import resume
from esper_soa.ops.anomaly import Watch
from esper_soa.ops.checkpoint import save_checkpoint
from esper_soa.ops.collect import Player, play_round
from esper_soa.ops.device import (
    apply_threads,
    choose_env_chunk,
    choose_eval_batch,
    choose_workers,
    device_name,
    keep_freed_memory,
    layout_in_words,
    resolve_device,
)
from esper_soa.ops.interrupt import Interrupted, Requests, signals_noted
from esper_soa.ops.memory import check_room, naming_memory
from esper_soa.ops.profile import make_profile
from esper_soa.ops.progress import LOGGER, Progress, logging_to
from esper_soa.ops.report import HostScore, Pareto, SeedCounts, Speed, Summary, print_summary, write_summary
from esper_soa.ops.rundir import RunFolder, claimed, drop_unfinished, rounds_of, write_config_file, write_versions
from esper_soa.ops.tally import RoundResult
from esper_soa.ops.telemetry import Json, MetricsWriter, keep_rounds
from esper_soa.state import LEDGER_FLOAT
from esper_soa.vocabulary import NUM_BLUEPRINTS, STAGE_NAMES


def build_rules(cfg: TrainConfig, device: torch.device) -> Rules:
    """Everything that stays the same during a run, on `device`."""
    slots = enabled_slots(cfg.task, list(cfg.slots))
    shape = host_shape(cfg.task, slots)
    detached = tuple(STAGE_NAMES.index(stage) for stage in cfg.lifecycle.detached_stages)
    eval_batch = choose_eval_batch(device, switch.current().native)
    chunk = choose_env_chunk(cfg.compute.env_chunk, cfg.envs, cfg.batch_size, device)
    workers = choose_workers(cfg.compute.workers, len(chunks(cfg.envs, chunk)), device)
    allowed = torch.zeros(NUM_BLUEPRINTS, dtype=torch.bool)
    allowed[list(blueprint_codes(list(cfg.task.blueprints)))] = True
    rank = torch.tensor([shape.execution_order.index(slot) for slot in range(len(slots))])
    orders, codes = shapley_orders(cfg, len(slots))
    rows = SubsetRows(cfg.attribution.pairs, codes)
    steps = network_cache(cfg.compute.cuda_graphs, device)
    precision = choose_precision(cfg.compute.precision, device).dtype
    return Rules(
        nets=NetsConfig(shape, cfg.task, detached, chunk, eval_batch, rows, workers, precision, steps),
        lifecycle=cfg.lifecycle,
        gates=cfg.gates,
        signals=cfg.signals,
        governor=cfg.governor,
        reward=RewardSettings(cfg.reward, parameter_table(shape, device), cfg.steps),
        blueprints=allowed.to(device),
        execution_rank=rank.to(device),
        max_seeds=cfg.max_seeds,
        shapley_orders=None if orders is None else orders.to(device),
    )


def shapley_orders(cfg: TrainConfig, num_slots: int) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Orders of arrival int64 [P, S] for sampled Shapley values and the subsets that they need, the same all run long.

    None where they are not asked for, and where the slots are so few that all subsets are evaluated.
    """
    samples = cfg.attribution.shapley_samples
    if samples == 0 or num_slots <= EXACT_SLOTS:
        return None, ()
    orders = arrival_orders(num_slots, samples, cfg.seed, torch.device("cpu"))
    return orders, tuple(dict.fromkeys(prefix_codes(orders).flatten().tolist()))


def build_world(cfg: TrainConfig, device: torch.device, seed: int | None = None) -> World:
    """N envs with weights and data, of cfg.seed where no other is given.

    Raises SettingError or DataError for what does not fit together.
    """
    check_room(cfg, device)
    keep_freed_memory(device)
    switch.choose(cfg.compute.native, device, choose_precision(cfg.compute.precision, device).dtype)
    triton_switch.choose(cfg.compute.triton, device)
    formulations.choose(cfg.compute.convolutions, device)
    images = load_images(cfg.data, device)
    sizes = Sizes(cfg.envs, cfg.batch_size, cfg.train_samples, cfg.val_samples)
    kernels, still = compiled() if cfg.compute.compile else EAGER, decision_cache(cfg.compute.cuda_graphs, device)
    kernels = kernels if still is None else on_fixed_memory(kernels, still)
    return World(build_rules(cfg, device), images, sizes, cfg.data, cfg.seed if seed is None else seed, kernels)


def build_player(cfg: TrainConfig, world: World) -> Player:
    """The decision maker that `policy.name` asks for."""
    if cfg.policy.name != "ppo":
        return Player(scripted_policy(cfg.policy, cfg.task.blueprints), None)
    names = tuple(spec.name for spec in world.rules.nets.shape.slots)
    policy = RecurrentPolicy(cfg.policy, len(names), len(feature_names(names)), cfg.seed).to(world.device)
    still = decision_cache(cfg.compute.cuda_graphs, world.device)
    learner = Learner(policy, cfg.policy.ppo, cfg.policy.ppo.floor_penalty_rounds, cfg.seed, still)
    return Player(policy if still is None else StillPolicy(policy, still), learner)


class Run:
    """A run in progress: what is built once, what adds up over rounds, and what a checkpoint would hold now."""

    def __init__(self, cfg: TrainConfig, folder: RunFolder, requests: Requests) -> None:
        self.cfg, self.folder, self.requests = cfg, folder, requests
        self.started = time.monotonic()
        apply_threads(cfg.compute.threads)
        self.device = resolve_device(cfg.device)
        self.world = build_world(cfg, self.device)
        self.precision = choose_precision(cfg.compute.precision, self.device)
        self.place = device_name(self.device, self.world.rules.nets.workers, self.precision.name)
        self.player = build_player(cfg, self.world)
        self.watch = Watch(cfg.telemetry.anomaly)
        self.profile = make_profile(cfg.profile, self.device, folder.path)
        self.done = resume.Progressed()
        self.written = -1  # rounds done at the newest checkpoint that this process wrote
        self.held = self.content()

    def restore(self, saved: resume.Saved, path: Path) -> None:
        """Go on where `saved` stood; the folder is brought back to that round."""
        resume.check_data(saved, self.world.images)
        if self.player.learner is not None:
            resume.restore_learner(self.player.learner, saved, path)
        self.done = saved.progress
        self.watch.load_state_dict(saved.watch)
        self.held = self.content()
        done = self.done.rounds_done
        LOGGER.info("resume   %s: %d of %d rounds are done", path.name, done, self.cfg.rounds)
        for name in drop_unfinished(self.folder, done):
            LOGGER.warning("resume   %s is dropped: this run makes its rounds anew", name)
        keep_rounds(self.folder.episodes, done)
        if keep_rounds(self.folder.metrics, done) < done:
            LOGGER.warning("resume   metrics.jsonl lacks rounds that the checkpoint has done")

    def content(self) -> dict:
        """What a checkpoint of this moment holds. The policy changes in place, only while it is updated."""
        learner = self.player.learner.state_dict() if self.player.learner is not None else None
        return resume.run_content(self.done, self.cfg, self.world.images, self.watch.state_dict(), learner)

    def announce(self) -> None:
        """Say what will be done, on which data and device."""
        cfg, world = self.cfg, self.world
        sizes, slots = world.sizes, ", ".join(spec.name for spec in world.rules.nets.shape.slots)
        LOGGER.info("data     %s: %s", world.images.name, world.images.source)
        LOGGER.info("hosts    %d x %s, %d parameters each, slots %s", sizes.num_envs, cfg.task.name,
                    world.rules.reward.counts.host, slots)  # fmt: skip
        LOGGER.info("work     %d rounds of %d env-steps; T=%d training and V=%d validation images, batches of %d",
                    cfg.rounds, cfg.steps, sizes.train_samples, sizes.val_samples, sizes.batch_size)  # fmt: skip
        LOGGER.info("policy   %s, reward %s, on %s", cfg.policy.name, cfg.reward.mode, self.place)
        nets = world.rules.nets
        LOGGER.info("compute  %s", layout_in_words(self.device, nets.workers, nets.env_chunk))
        LOGGER.info("numbers  hosts compute in %s: %s", self.precision.name, self.precision.reason)
        kernels = switch.current()
        LOGGER.log(WARNING if kernels.fallback else INFO, "kernels  %s", kernels.reason)

    def one_round(self, number: int, progress: Progress) -> tuple[dict[str, Json], list[dict[str, Json]]]:
        """Collect and update; returns the round's line for metrics.jsonl, and its lines for episodes.jsonl."""
        begun = time.monotonic()
        self.profile.lap("files")
        label = f"round {number + 1}/{self.cfg.rounds}"
        result, rollout = play_round(self.world, self.player, number, progress, label, self.profile)
        collected = time.monotonic()
        self.keep_best(result)
        update: dict[str, float] = {}
        if self.player.learner is not None and rollout is not None:
            update = self.player.learner.update(rollout)
        ended = time.monotonic()
        self.profile.lap("update")
        self.profile.report(label)
        for anomaly in self.watch.look(update):
            LOGGER.warning("round %d  %s: %s", number + 1, anomaly.name, anomaly.message)
        self.count(result, ended - begun)
        env_steps = self.cfg.envs * self.cfg.steps
        line: dict[str, Json] = {"round": number + 1, "env_steps": (number + 1) * env_steps}
        line |= result.record | {"pareto": asdict(self.pareto())}
        line |= {"eps": env_steps / (ended - begun), "collect_seconds": collected - begun,
                 "update_seconds": ended - collected, "update": update, "anomalies": self.watch.active}  # fmt: skip
        episodes = [{"round": number + 1, "env": env} | episode for env, episode in enumerate(result.episodes)]
        return line, episodes

    def count(self, result: RoundResult, seconds: float) -> None:
        """Add a round to what has been done."""
        done = self.done
        done.rounds_done += 1
        done.seconds += seconds
        done.alpha_rows += result.alpha_rows
        done.seeds = {name: done.seeds.get(name, 0) + count for name, count in result.seeds.items()}
        done.front = trade_offs(torch.tensor(done.front + result.points, dtype=LEDGER_FLOAT)).tolist()
        done.accuracies, done.parameters, done.rewards = result.accuracies, result.parameters, result.rewards
        self.held = self.content()

    def pareto(self) -> Pareto:
        """The trade-offs that the run has found so far."""
        front = torch.tensor(self.done.front, dtype=LEDGER_FLOAT).view(-1, 3)
        return Pareto(len(front), float(hypervolume(front[:, 0], front[:, 2])))

    def keep_best(self, result: RoundResult) -> None:
        """Before the update: keep the policy that has just played, if no round before ended with a higher accuracy."""
        accuracy = math.fsum(result.accuracies) / len(result.accuracies)
        if self.player.learner is None or not accuracy > self.done.best_accuracy:
            return
        self.done.best_accuracy = accuracy
        self.try_to_write(self.folder.best)

    def write(self) -> Path:
        """Write the checkpoint of the rounds done, once, and drop those that are too old; returns where it is."""
        path = self.folder.checkpoint(self.held["progress"]["rounds_done"])
        if self.written != rounds_of(path):
            save_checkpoint(path, self.held)
            self.written = rounds_of(path)
            for old in self.folder.checkpoints()[: -self.cfg.checkpoint_keep]:
                old.unlink(missing_ok=True)
        return path

    def try_to_write(self, path: Path | None = None) -> None:
        """`write`, or the same content to `path`; a full disk costs the checkpoint, not the run."""
        try:
            if path is None:
                self.write()
            else:
                save_checkpoint(path, self.held)
        except OSError as error:
            LOGGER.warning("checkpoint could not be written (%s); older ones stay, the run goes on", error.strerror)

    def heed(self) -> None:
        """Do what signals have asked for; called between env-steps."""
        if self.requests.save:
            self.requests.save = False
            self.try_to_write()
            LOGGER.info("saved    %d rounds, as SIGUSR2 asked", self.held["progress"]["rounds_done"])
        if self.requests.stop:
            path, stop = self.write(), Interrupted(self.requests.stop)
            LOGGER.info("%s; %s holds %d of %d rounds. Go on with resume=%s", stop, path.name, rounds_of(path),
                        self.cfg.rounds, self.folder.path)  # fmt: skip
            raise stop

    def control(self, progress: Progress) -> HostScore | None:
        """The hosts of the last round on the same data, without growth; a policy that only waits is its own control."""
        if not wants_control(self.cfg):
            return None
        number = self.cfg.rounds - 1
        result, _ = play_round(self.world, Player(WaitPolicy(), None), number, progress, "without growth")
        return HostScore(result.accuracies, result.parameters)

    def summarise(self, control: HostScore | None) -> Summary:
        """What the final table says."""
        cfg, sizes, done = self.cfg, self.world.sizes, self.done
        env_steps = done.rounds_done * cfg.envs * cfg.steps
        rows = done.alpha_rows / done.rounds_done
        return Summary(
            name=cfg.name,
            task=cfg.task.name,
            policy=cfg.policy.name,
            data=f"{self.world.images.name} ({self.world.images.source})",
            device=self.place,
            envs=cfg.envs,
            rounds=cfg.rounds,
            steps=cfg.steps,
            grown=HostScore(done.accuracies, done.parameters),
            control=control,
            seeds=SeedCounts(**{name: done.seeds[name] for name in ("germinated", "blended", "fossilized", "pruned")}),
            reward=sum(done.rewards) / len(done.rewards),
            speed=Speed(env_steps, done.seconds, sizes.train_samples, sizes.val_samples, rows),
            wall_seconds=time.monotonic() - self.started,
            pareto=self.pareto(),
            rollbacks=done.seeds.get("rollbacks", 0),
        )


def wants_control(cfg: TrainConfig) -> bool:
    """Whether the last round is also played without growth."""
    return cfg.baseline_comparison and cfg.policy.name != "wait"


def open_run(cfg: TrainConfig, folder: RunFolder, checkpoint: Path | None, requests: Requests) -> Run:
    """A run at its start, or where `checkpoint` stood; raises UserError where it cannot go on from there."""
    if checkpoint is None:
        if cfg.resume:
            LOGGER.info("resume   no checkpoint was found: the run starts afresh")
            keep_rounds(folder.metrics, 0)
            keep_rounds(folder.episodes, 0)
        job = Run(cfg, folder, requests)
    else:
        saved = resume.read_run(checkpoint, resolve_device(cfg.device))
        changed = resume.check_settings(saved, cfg)
        job = Run(cfg, folder, requests)
        job.restore(saved, checkpoint)
        write_config_file(folder, settings_yaml(cfg))
        for change in changed:
            LOGGER.info("resume   changed %s", change)
        for change in resume.version_changes(saved):
            LOGGER.warning("resume   changed %s: results may differ in rounding", change)
    images = job.world.images
    data = {"name": images.name, "source": images.source, "identity": images.identity}
    write_versions(folder, job.place, data)
    return job


def play(job: Run, shown: Progress) -> HostScore | None:
    """All rounds that are left, each with its line and its checkpoint; returns the score of the control."""
    cfg = job.cfg
    files = MetricsWriter(job.folder.metrics), MetricsWriter(job.folder.episodes)
    with shown as progress, files[0] as metrics, files[1] as episodes:
        for number in range(job.done.rounds_done, cfg.rounds):
            line, played = job.one_round(number, progress)
            for episode in played:
                episodes.write(episode)
            episodes.sync()
            metrics.write(line)
            metrics.sync()
            if cfg.checkpoint_every and (number + 1) % cfg.checkpoint_every == 0:
                job.try_to_write()
            job.heed()
        job.write()
        return job.control(progress)


def run(cfg: TrainConfig, folder: RunFolder, checkpoint: Path | None = None) -> Summary:
    """Run the whole job in `folder`, from `checkpoint` on where given; returns what the final table says.

    Raises Interrupted where a signal stopped it, after writing a checkpoint; OutOfRoomError where memory ran out.
    """
    console = Console(file=sys.stdout)
    if cfg.compute.compile:
        torch.compiler.reset()  # jobs of a sweep share a process: what one compiled is nothing to the next
    with claimed(folder), logging_to(folder.log, console), signals_noted() as requests:
        with naming_memory(UserError):
            job = open_run(cfg, folder, checkpoint, requests)
        job.announce()
        with naming_memory(OutOfRoomError):
            control = play(job, progress_bar(job, console, job.heed))
        job.profile.close()
        summary = job.summarise(control)
        write_summary(summary, folder.summary)
        print_summary(summary, console)
        LOGGER.info("files    %s", folder.path)
    return summary


def progress_bar(job: Run, console: Console, after_step: Callable[[], None]) -> Progress:
    """What shows the env-steps of the run, those done before and those of the control included."""
    cfg = job.cfg
    per_round = cfg.envs * cfg.steps
    total = per_round * (cfg.rounds + int(wants_control(cfg)))
    show = cfg.telemetry
    return Progress(total, console, show.progress, show.plain_interval, done=job.done.rounds_done * per_round,
                    after_step=after_step)  # fmt: skip
