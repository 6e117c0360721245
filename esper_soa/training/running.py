"""A run in progress: what is built once, what a round does, and what a checkpoint would hold now.

Where ranks share out the envs, each has one, all alike, and that of the first rank writes.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from logging import INFO, WARNING
from operator import sub
from pathlib import Path
from signal import Signals

import torch

from esper_soa.config.agent import SCRATCH
from esper_soa.config.errors import check
from esper_soa.config.registry import is_reference
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.env.outcome import hypervolume, trade_offs
from esper_soa.env.reward import final_rents
from esper_soa.grown.networks import Networks
from esper_soa.lab.telemetry.recorder import NO_RECORDER, NoRecorder, envs_table, recorded
from esper_soa.lab.telemetry.tracking import Told, Tracked, Tracking, openers
from esper_soa.nets.data.datasets import ImageSet
from esper_soa.nets.data.user_images import check_images
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.precision import choose_precision
from esper_soa.runtime.device import (
    apply_threads,
    device_name,
    layout_in_words,
    resolve_device,
    take_device,
)
from esper_soa.runtime.json_lines import Json
from esper_soa.runtime.memory import plan_in_words
from esper_soa.runtime.ranks import ALONE, Ranks
from esper_soa.runtime.signals import STOPPING, Interrupted, Requests
from esper_soa.state import STATE_FLOAT
from esper_soa.training import resume
from esper_soa.training.anomaly import Watch
from esper_soa.training.build import build_player, build_worlds
from esper_soa.training.checkpoint import save_checkpoint
from esper_soa.training.collect import Round, play_round
from esper_soa.training.controls import Grown, play_control
from esper_soa.training.final_table import SEEDS, Pareto, Speed, Summary
from esper_soa.training.metrics import RoundResult
from esper_soa.training.profile import make_profile
from esper_soa.training.progress import LOGGER, Progress
from esper_soa.training.run_folder import rounds_of
from esper_soa.training.session import Session
from esper_soa.training.verdict import Episode, HostScore, control_words

NEWEST = "the newest checkpoint"  # what it is called where it could not be written


class Run:
    """A run in progress."""

    def __init__(
        self,
        cfg: TrainConfig,
        within: Session,
        resumed: bool = False,
        images: ImageSet | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """At its start; `resumed` where a checkpoint is to be restored: policy.init is not read.

        images: those that a program hands over, with data.name=given.
        """
        name = cfg.data.name
        check(images is None or name == "given", "data.name", name, "given with images handed over")
        self.cfg = cfg
        self.within = within
        self.folder = within.folder
        self.writes = ranks.first
        self.requests = Requests()
        self.started = time.monotonic()
        self.device = resolve_device(cfg.device, ranks.local_rank)
        self.take_turn()
        self.world = build_worlds(cfg, self.device, images, ranks)
        self.precision = choose_precision(cfg.compute.precision, self.device)
        self.place = device_name(self.device, self.world.rules.nets.workers, self.precision.name)
        own = replace(cfg, policy=replace(cfg.policy, init=SCRATCH)) if resumed else cfg
        self.player = build_player(own, self.world)
        self.watch = Watch(cfg.telemetry.anomaly)
        self.profile = make_profile(cfg.profile, self.device, self.folder.path)
        self.networks = Networks(self.folder, within.unwritten, cfg, self.world)
        self.recorder: NoRecorder = NO_RECORDER
        self.table = envs_table(cfg, self.world)
        self.trackers = openers(cfg.track)
        self.tracking: Tracking | None = None
        self.done = resume.Progressed()
        self.rounds_before = self.env_steps_before = 0  # that were done when this process went on
        self.control: HostScore | None = None
        self.control_cut_off = 0  # env-steps that it did not play, as episodes had ended early
        self.written = -1  # rounds done at the newest checkpoint that this process wrote
        self.held = self.content()

    def restore(self, saved: resume.Saved, path: Path) -> None:
        """Go on where `saved` stood; the folder is brought back to that round."""
        resume.check_data(saved, self.world.data)
        if self.player.learner is not None:
            resume.restore_learner(self.player.learner, saved, path)
        self.done = saved.progress
        self.watch.load_state_dict(saved.watch)
        self.held = self.content()
        done = self.rounds_before = self.done.rounds_done
        self.env_steps_before = self.env_steps
        LOGGER.info("resume   %s: %d of %d rounds are done", path.name, done, self.cfg.rounds)
        if self.writes:
            resume.cut_back(self.folder, done)
        self.networks.go_back(done)

    def content(self) -> dict:
        """What a checkpoint of this moment holds; what changes in place is copied."""
        learner = self.player.learner
        state = None
        if learner is not None:
            weights = learner.policy.state_dict()
            copies = {name: weight.clone() for name, weight in weights.items()}
            state = learner.state_dict() | {"policy": copies}
        return resume.run_content(
            self.done, self.cfg, self.world.data, self.watch.state_dict(), state
        )

    def take_turn(self) -> None:
        """Give torch the threads and device of this run; several may take turns in a process."""
        apply_threads(self.cfg.compute.threads)
        take_device(self.device)

    def announce(self) -> None:
        """Say what will be done, on which data and device, and by which kernels."""
        cfg = self.cfg
        data = self.world.data
        rules = self.world.rules
        nets = rules.nets
        host = cfg.task.host_name + " of your own" * is_reference(cfg.task.host)
        slots = ", ".join(spec.name for spec in nets.shape.slots)
        hosts = f"{self.world.sizes.num_envs} x {host}, {rules.reward.counts.host} parameters each"
        work = (
            f"{cfg.rounds} rounds of {cfg.steps} env-steps; T={cfg.train_samples} training and "
            f"V={cfg.val_samples} validation images, batches of {cfg.batch_size}"
        )
        for note in (f"{data.name}: {data.source}", *data.notes):
            LOGGER.info("data     %s", note)
        if isinstance(data, ImageSet) and data.num_classes is not None:
            for finding in check_images(data):
                LOGGER.warning("data     %s", finding)
        LOGGER.info("hosts    %s, slots %s", hosts, slots)
        for one in nets.shape.blueprints[len(BLUEPRINTS) :]:
            LOGGER.info("seeds    %s of your own, code %d", one.name, one.code)
        LOGGER.info("work     %s", work)
        modes = "+".join(cfg.reward.modes)
        LOGGER.info("policy   %s, reward %s, on %s", cfg.policy.name, modes, self.place)
        LOGGER.info("compute  %s", layout_in_words(self.device, nets.workers, nets.env_chunk))
        LOGGER.info("memory   %s", plan_in_words(cfg, self.device, rules))
        LOGGER.info("numbers  hosts compute in %s: %s", self.precision.name, self.precision.reason)
        engine = rules.engine.chosen
        LOGGER.log(WARNING if engine.fallback else INFO, "kernels  %s", engine.reason)
        for tried in engine.tried:
            LOGGER.info("kernels  %s", tried)
        LOGGER.info("state    %s", self.world.kernels.reason)
        LOGGER.info("graphs   %s", self.world.kernels.replay.reason)
        for left_out in self.world.kernels.replay.left_out:
            LOGGER.warning("graphs   %s", left_out)

    def one_round(
        self, number: int, progress: Progress
    ) -> tuple[dict[str, Json], list[dict[str, Json]]]:
        """Collect and update; returns the lines for metrics.jsonl and for episodes.jsonl."""
        begun = time.monotonic()
        self.profile.phase_ended("files")
        label = f"round {number + 1}/{self.cfg.rounds}"
        played = Round(number, progress, label, self.profile, None, self.recorder)
        taught = number < self.cfg.policy.imitation.rounds
        player = self.player if taught else self.player._replace(teacher=None)
        result, rollout = play_round(self.world, player, played)
        collected = time.monotonic()
        self.keep_best(result)
        self.profile.phase_ended("files")
        learned_from = time.monotonic()
        update: dict[str, float] = {}
        learner = self.player.learner
        if learner is not None and rollout is not None:
            update = learner.imitate(rollout) if taught else learner.update(rollout)
        collect_seconds = collected - begun
        update_seconds = time.monotonic() - learned_from
        self.profile.phase_ended("update")
        self.profile.report(label)
        for anomaly in self.watch.look(update):
            LOGGER.warning("round %d  %s: %s", number + 1, anomaly.name, anomaly.message)
        seconds = collect_seconds + update_seconds
        self.count(result, seconds)
        self.networks.follow(result.standing, self.done.rounds_done)
        line: dict[str, Json] = {
            "round": number + 1,
            "env_steps": self.env_steps,
            **result.record,
            "pareto": asdict(self.pareto()),
            "eps": result.env_steps / seconds,
            "collect_seconds": collect_seconds,
            "update_seconds": update_seconds,
            "update": update,
            "anomalies": self.watch.active,
        }
        episodes = [
            {"round": number + 1, "env": env} | episode
            for env, episode in enumerate(result.episodes)
        ]
        return line, episodes

    @property
    def env_steps(self) -> int:
        """That were played so far, of all envs."""
        return self.done.rounds_done * self.cfg.envs * self.cfg.steps - self.done.cut_off

    def cut_off(self, result: RoundResult) -> int:
        """Env-steps of a round that were not played, as episodes had ended early."""
        return self.cfg.envs * self.cfg.steps - result.env_steps

    def count(self, result: RoundResult, seconds: float) -> None:
        """Add a round to what has been done."""
        done = self.done
        done.rounds_done += 1
        done.cut_off += self.cut_off(result)
        done.seconds += seconds
        done.alpha_rows += result.alpha_rows
        done.seeds = {name: done.seeds.get(name, 0) + count for name, count in result.seeds.items()}
        points = torch.tensor(done.front + result.points, dtype=STATE_FLOAT)
        done.front = trade_offs(points).tolist()
        done.rewards = result.rewards
        done.recent = [*done.recent, resume.Played.of(result)][-self.cfg.control_rounds :]
        self.held = self.content()

    def open_tracking(self) -> Tracking:
        """What tells the trackers of the rounds, until it is closed."""
        tracked = Tracked(self.folder.path, self.cfg.name, flat_settings(asdict(self.cfg)))
        told = Told(self.folder.path, self.done.rounds_done > 0, self.within.unwritten)
        self.tracking = Tracking(self.trackers, tracked, told)
        return self.tracking

    def pareto(self) -> Pareto:
        """The trade-offs that the run has found so far."""
        front = torch.tensor(self.done.front, dtype=STATE_FLOAT).view(-1, 3)
        return Pareto(len(front), float(hypervolume(front[:, 0], front[:, 2])))

    def keep_best(self, result: RoundResult) -> None:
        """Before the update: keep the policy that has just played the best round so far."""
        accuracy = math.fsum(result.accuracies) / len(result.accuracies)
        if self.player.learner is None or not accuracy > self.done.best_accuracy:
            return
        self.done.best_accuracy = accuracy
        if not self.writes:
            return
        with self.within.unwritten.noting(self.folder.best.name):
            save_checkpoint(self.folder.best, self.held)

    def write(self) -> None:
        """Write the checkpoint of the rounds done, once, and drop those that are too old.

        A full disk costs the checkpoint, not the run; older ones stay.
        """
        path = self.folder.checkpoint(self.held["progress"]["rounds_done"])
        if self.written == rounds_of(path) or not self.writes:
            return
        self.recorder.flush()
        with self.within.unwritten.noting(NEWEST):
            save_checkpoint(path, self.held)
            self.written = rounds_of(path)
            for old in self.folder.checkpoints()[: -self.cfg.checkpoint_keep]:
                old.unlink(missing_ok=True)
            self.networks.tidy()

    def heed(self) -> None:
        """Do what signals have asked for; called between env-steps.

        Raises Interrupted to stop. Where another program handles a signal, its handler is called
        after the checkpoint is written; the run goes on unless that raises.
        """
        self.within.look_at_console()
        requests = self.requests
        done = self.held["progress"]["rounds_done"]
        for number in requests.waiting():
            self.write()
            stop = Interrupted(number, str(self.within.unwritten))
            way_on = f"Go on with resume={self.folder.path}"
            saved = f"{done} of {self.cfg.rounds} rounds are saved. {way_on}"
            LOGGER.info("%s: %s", Signals(number).name, stop.unsaved or saved)
            if not requests.heeded(number) and number in STOPPING:
                raise stop

    def play_control(self, progress: Progress) -> None:
        """Have the control, where there is one, play the last rounds."""
        cfg = self.cfg
        if not wants_control(cfg):
            return
        recent = self.done.recent
        label = control_words(cfg.control)
        played = [
            play_control(cfg.control, cfg, self.world, grown, Round(number, progress, label))
            for number, grown in enumerate(recent, self.done.rounds_done - len(recent))
        ]
        self.control_cut_off = sum(map(self.cut_off, played))
        self.control = self.score(cfg.control, played)

    def score(self, name: str, played: Sequence[Grown]) -> HostScore:
        """The rounds of the player `name` for the final table; all pay rent by the run's host."""
        reward = self.world.rules.reward
        episodes = []
        for one in played:
            rents = final_rents(one.parameters, reward.counts.host, reward.config)
            net = [*map(sub, one.accuracies, rents)]
            episodes.append(Episode(one.accuracies, one.parameters, net, one.train_flop))
        return HostScore(name, episodes)

    def summarise(self) -> Summary:
        """What the final table says."""
        cfg = self.cfg
        done = self.done
        rows = done.alpha_rows / done.rounds_done
        lacking = self.tracking.dropped if self.tracking is not None else {}
        return Summary(
            name=cfg.name,
            task=cfg.task.host_name,
            policy=cfg.policy.name,
            data=f"{self.world.data.name} ({self.world.data.source})",
            device=self.place,
            envs=cfg.envs,
            rounds=cfg.rounds,
            steps=cfg.steps,
            grown=self.score(cfg.policy.name, done.recent),
            control=self.control,
            test_images=len(self.world.data.test_labels),
            seeds={name: done.seeds[name] for name in SEEDS},
            reward=sum(done.rewards) / len(done.rewards),
            speed=Speed(self.env_steps, done.seconds, cfg.train_samples, cfg.val_samples, rows),
            wall_seconds=time.monotonic() - self.started,
            pareto=self.pareto(),
            rollbacks=done.seeds.get("rollbacks", 0),
            rounds_before=self.rounds_before,
            env_steps_before=self.env_steps_before,
            control_cut_off=self.control_cut_off,
            policy_init=cfg.policy.init if cfg.policy.name == "ppo" else SCRATCH,
            telemetry=recorded(cfg.telemetry.level, self.recorder, lacking),
        )


def wants_control(cfg: TrainConfig) -> bool:
    """Whether the last rounds are also played by a control; a policy is no control of itself."""
    return cfg.control not in ("none", cfg.policy.name)
