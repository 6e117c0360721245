"""A run in progress: what is built once, what its rounds add up to, and what it writes."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from logging import DEBUG, INFO, WARNING
from operator import sub
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import torch

from esper_soa.config.agent import SCRATCH
from esper_soa.config.registry import is_reference
from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.nets.data.datasets import SUBSET, ImageSet
from esper_soa.nets.data.user_images import check_images
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
from esper_soa.runtime.signals import STOPPING, Interrupted
from esper_soa.training import resume
from esper_soa.training.anomaly import Watch
from esper_soa.training.build import build_worlds
from esper_soa.training.callbacks import Callback, make_recorder
from esper_soa.training.collect import Round
from esper_soa.training.controls import GrownHosts, play_control
from esper_soa.training.final_table import SEEDS, Speed, Summary
from esper_soa.training.final_test import with_test
from esper_soa.training.metrics import RoundResult
from esper_soa.training.output import RunOutput
from esper_soa.training.players import build_player
from esper_soa.training.profile import make_profile
from esper_soa.training.progress import LOGGER, Progress
from esper_soa.training.run_folder import RunFolder, write_config
from esper_soa.training.session import Session
from esper_soa.training.totals import RunTotals, cut_off
from esper_soa.training.verdict import Episode, HostScore, control_text
from esper_soa.vocabulary import NUM_BLUEPRINTS


class Origin(NamedTuple):
    """Where this process began with the run."""

    clock: float  # time.monotonic() before anything was built
    place: str = ""  # the device in words
    rounds: int = 0  # that earlier processes did
    env_steps: int = 0  # of all envs, in these


class Control(NamedTuple):
    """What the control reached."""

    score: HostScore
    cut_off: int  # env-steps that were not simulated, as episodes had ended early


class Run:
    """A run in progress. Where ranks share out the envs, each has one, all alike."""

    def __init__(
        self,
        cfg: TrainConfig,
        session: Session,
        resumed: bool = False,
        ranks: Ranks = ALONE,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Build a run at its start.

        resumed: whether `restore` comes next, so that policy.init is not read.
        """
        begin = time.monotonic()
        device = resolve_device(cfg.device, ranks.local_rank)
        apply_threads(cfg.compute.threads)
        take_device(device)
        own = replace(cfg, policy=replace(cfg.policy, init=SCRATCH)) if resumed else cfg
        self.cfg = cfg
        self.session = session
        self.ranks = ranks
        self.world = build_worlds(cfg, device, ranks)
        self.player = build_player(own, self.world)
        self.watch = Watch(cfg.telemetry.anomaly)
        self.profile = make_profile(cfg.profile, device, self.folder.path)
        self.totals = RunTotals()
        self.control: Control | None = None
        self.output = RunOutput(cfg, session, self.world, ranks, callbacks)
        nets = self.world.rules.nets
        self.origin = Origin(begin, device_name(device, nets.workers, nets.precision))
        self.output.checkpoint = self.checkpoint()

    @property
    def folder(self) -> RunFolder:
        """Paths of the files of the run."""
        return self.session.folder

    @property
    def device(self) -> torch.device:
        """The device of hosts and policy."""
        return self.world.device

    def restore(self, checkpoint_run: resume.SavedRun, path: Path) -> None:
        """Continue from `checkpoint_run`; files of later rounds are cut back."""
        resume.check_data(checkpoint_run, self.world.data)
        if self.player.learner is not None:
            resume.restore_learner(self.player.learner, checkpoint_run, path)
        self.totals = checkpoint_run.progress
        self.watch.load_state_dict(checkpoint_run.watch)
        output = self.output
        output.checkpoint = self.checkpoint()
        done = self.totals.rounds_done
        self.origin = self.origin._replace(rounds=done, env_steps=self.totals.env_steps(self.cfg))
        LOGGER.info("resume   %s: %d of %d rounds are done", path.name, done, self.cfg.rounds)
        output.truncate(done)
        if output.writes:
            with output.write_errors.attempt(self.folder.config.name):
                write_config(self.folder, settings_yaml(self.cfg))
        for change in resume.check_settings(checkpoint_run, self.cfg):
            LOGGER.info("resume   changed %s", change)
        engine = self.world.rules.engine.chosen.name
        for change in resume.version_changes(checkpoint_run, self.folder, engine):
            LOGGER.warning("resume   changed %s", change)

    def checkpoint(self) -> dict:
        """The content of a checkpoint of this moment; what changes in place is copied."""
        learner = self.player.learner
        state = None
        if learner is not None:
            weights = learner.policy.state_dict()
            copies = {name: weight.clone() for name, weight in weights.items()}
            state = learner.state_dict() | {"policy": copies}
        return resume.run_content(
            self.totals, self.cfg, self.world.data, self.watch.state_dict(), state
        )

    def announce(self) -> None:
        """Say on the console which data, hosts, policy and memory; the rest goes to the log."""
        cfg = self.cfg
        data = self.world.data
        rules = self.world.rules
        shape = rules.nets.shape
        host = cfg.task.host_name + " of your own" * is_reference(cfg.task.host)
        slots = ", ".join(spec.name for spec in shape.slots)
        hosts = f"{self.world.sizes.num_envs} x {host}, {rules.reward.counts.host:,} parameters"
        rounds = f"{cfg.rounds} round{'s' * (cfg.rounds > 1)} of {cfg.steps} env-steps"
        start = cfg.policy.init if cfg.policy.name == "ppo" else SCRATCH
        policy = cfg.policy.name + f" from {start}" * (start != SCRATCH)
        modes = "+".join(cfg.reward.modes)
        named = data.source.startswith(data.name)
        level = WARNING if data.source.startswith(SUBSET) else INFO
        LOGGER.log(level, "data     %s", data.source if named else f"{data.name}: {data.source}")
        if isinstance(data, ImageSet) and data.num_classes is not None:
            for finding in check_images(data):
                LOGGER.warning("data     %s", finding)
        LOGGER.info("hosts    %s, slots %s; %s", hosts, slots, rounds)
        for one in shape.blueprints:
            if one.code >= NUM_BLUEPRINTS:
                LOGGER.info("seeds    %s of your own, code %d", one.name, one.code)
        LOGGER.info("policy   %s, reward %s, on %s", policy, modes, self.origin.place)
        if cfg.policy.name == "ppo" and cfg.policy.ppo.minibatches > cfg.envs:
            LOGGER.warning(
                "policy   policy.ppo.minibatches=%d is more than envs=%d: one minibatch per env",
                cfg.policy.ppo.minibatches,
                cfg.envs,
            )
        LOGGER.info("memory   %s", plan_in_words(cfg, self.device, rules))
        self.log_details()

    def log_details(self) -> None:
        """Write to the log how samples are prepared, the work, and what computes it."""
        cfg = self.cfg
        nets = self.world.rules.nets
        engine = self.world.rules.engine.chosen
        replay = self.world.kernels.replay
        samples = f"V={cfg.val_samples} validation {self.world.data.spec.name}"
        each = f"of every host per env-step, in batches of {cfg.batch_size}"
        work = f"T={cfg.train_samples} training and {samples} {each}"
        for note in self.world.data.notes:
            LOGGER.debug("data     %s", note)
        LOGGER.debug("work     %s", work)
        LOGGER.debug("compute  %s", layout_in_words(self.device, nets.workers, nets.env_chunk))
        precision = choose_precision(self.cfg.compute.precision, self.device)
        LOGGER.debug("numbers  hosts compute in %s: %s", precision.name, precision.reason)
        LOGGER.log(WARNING if engine.fallback else DEBUG, "kernels  %s", engine.reason)
        for obstacle in engine.tried:
            LOGGER.debug("kernels  %s", obstacle)
        LOGGER.debug("state    kernels of the env state: %s", self.world.kernels.reason)
        LOGGER.debug("graphs   %s", replay.reason)
        for left_out in replay.left_out:
            LOGGER.warning("graphs   %s", left_out)

    def save_best(self, result: RoundResult) -> None:
        """Save the policy, before its update, where its round is the best so far."""
        accuracy = math.fsum(result.accuracies) / len(result.accuracies)
        if self.player.learner is not None and accuracy > self.totals.best_accuracy:
            self.totals.best_accuracy = accuracy
            self.output.save_best()

    def count(
        self, result: RoundResult, update: dict[str, float], seconds: dict[str, float]
    ) -> tuple[dict[str, Json], list[dict[str, Json]]]:
        """Count a round; returns its lines for metrics.jsonl and episodes.jsonl.

        seconds: collect_seconds and update_seconds. The hosts of a round that the final table is of
        are measured on the test images, which counts for neither.
        """
        totals = self.totals
        if totals.rounds_done >= self.cfg.rounds - self.cfg.control_rounds:
            result = with_test(self.world, result)
        totals.add(result, sum(seconds.values()), self.cfg)
        number = totals.rounds_done
        for name, message in self.watch.look(update).items():
            LOGGER.warning("round %d  %s: %s", number, name, message)
        self.output.checkpoint = self.checkpoint()
        metrics: dict[str, Json] = {
            "round": number,
            "env_steps": totals.env_steps(self.cfg),
            **result.record,
            "pareto": asdict(totals.pareto()),
            "eps": result.env_steps / sum(seconds.values()),
            **seconds,
            "update": update,
            "anomalies": self.watch.active,
        }
        episodes = [
            {"round": number, "env": env} | episode for env, episode in enumerate(result.episodes)
        ]
        return metrics, episodes

    def handle_signals(self) -> None:
        """Do what signals ask for, between two env-steps; raises Interrupted to stop.

        Where another program handles a signal, its handler is called after the checkpoint is saved;
        the run continues unless that raises.
        """
        self.session.check_console()
        requests = self.session.requests
        output = self.output
        done = output.checkpoint["progress"]["rounds_done"]
        for number in requests.waiting():
            output.save()
            stop = Interrupted(number, str(output.write_errors))
            resume_text = f"Go on with resume={self.folder.path}"
            rounds_text = f"{done} of {self.cfg.rounds} rounds are saved. {resume_text}"
            LOGGER.info("%s: %s", Signals(number).name, stop.unsaved or rounds_text)
            if not requests.handle(number) and number in STOPPING:
                raise stop

    def play_control(self, progress: Progress) -> None:
        """Play the last rounds with the control, where there is one."""
        cfg = self.cfg
        if not wants_control(cfg):
            return
        recent = self.totals.recent
        label = control_text(cfg.control)
        record = partial(make_recorder, cfg, session=self.session, ranks=self.ranks, control=True)
        results = [
            play_control(
                cfg.control,
                cfg,
                self.world,
                hosts,
                Round(number, progress, label),
                self.ranks,
                record,
            )
            for number, hosts in enumerate(recent, self.totals.rounds_done - len(recent))
        ]
        missing = sum(cut_off(result, cfg) for result in results)
        self.control = Control(self.score(cfg.control, results), missing)

    def score(self, name: str, rounds: Sequence[GrownHosts]) -> HostScore:
        """The rounds of the player `name` for the final table; all pay rent by the run's host."""
        episodes = []
        for one, grown in zip(rounds, self.totals.recent, strict=True):
            rents = self.world.final_rents(one.parameters, one.train_flop, grown.settings)
            tested = list(one.test_accuracies) or [math.nan] * len(one.accuracies)
            net = [*map(sub, tested, rents)]
            losses = list(one.test_losses) or [math.nan] * len(one.accuracies)
            scores = one.accuracies, tested, one.parameters, net, one.train_flop, losses
            episodes.append(Episode(*scores, grown.settings))
        return HostScore(name, episodes)

    def summarise(self) -> Summary:
        """The record of the final table and of summary.json."""
        cfg = self.cfg
        totals = self.totals
        recorder = self.output.recorder
        env_steps = totals.env_steps(cfg)
        rows = totals.alpha_rows / totals.rounds_done
        dropped = {"tables": recorder.dropped} if recorder.dropped else {}
        return Summary(
            name=cfg.name,
            task=cfg.task.host_name,
            policy=cfg.policy.name,
            data=f"{self.world.data.name} ({self.world.data.source})",
            device=self.origin.place,
            envs=cfg.envs,
            rounds=cfg.rounds,
            steps=cfg.steps,
            grown=self.score(cfg.policy.name, totals.recent),
            control=self.control.score if self.control else None,
            perplexity=self.world.data.spec.perplexity,
            test_images=len(self.world.data.test_labels),
            validation_images=len(self.world.data.val_labels),
            seeds={name: totals.seeds[name] for name in SEEDS},
            reward=sum(totals.rewards) / len(totals.rewards),
            speed=Speed(env_steps, totals.seconds, cfg.train_samples, cfg.val_samples, rows),
            wall_seconds=time.monotonic() - self.origin.clock,
            pareto=totals.pareto(),
            rollbacks=totals.seeds.get("rollbacks", 0),
            rounds_before=self.origin.rounds,
            env_steps_before=self.origin.env_steps,
            control_cut_off=self.control.cut_off if self.control else 0,
            samples=self.world.data.spec.name,
            policy_init=cfg.policy.init if cfg.policy.name == "ppo" else SCRATCH,
            telemetry={
                "level": cfg.telemetry.level,
                "env_steps": recorder.env_steps,
                "dropped": dropped | self.output.lost,
            },
        )


def wants_control(cfg: TrainConfig) -> bool:
    """Whether a control repeats the last rounds; a policy is no control of itself."""
    return cfg.control not in ("none", cfg.policy.name)
