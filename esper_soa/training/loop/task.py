"""A task of a run in progress: its hosts, what their rounds add up to, and its control."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict
from functools import partial
from logging import DEBUG, INFO, WARNING
from operator import sub
from typing import cast

from esper_soa.config.agent import SCRATCH
from esper_soa.config.lab import find_in_lab
from esper_soa.config.registry import is_reference
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.data.batches import origin
from esper_soa.nets.data.datasets import SUBSET_WORDS, ImageSet
from esper_soa.nets.data.image_set import sets_of
from esper_soa.nets.data.user_images import check_images
from esper_soa.nets.precision import choose_precision
from esper_soa.runtime.device import layout_in_words
from esper_soa.runtime.memory import needs_in_words
from esper_soa.runtime.ranks import Ranks
from esper_soa.system.errors import UserError
from esper_soa.system.json_lines import Json
from esper_soa.training.files.saved_run import SavedTask
from esper_soa.training.files.session import Session
from esper_soa.training.loop.callbacks import Callback, make_callbacks
from esper_soa.training.loop.collect import Player, Round
from esper_soa.training.loop.controls import GrownHosts, play_control
from esper_soa.training.loop.recorder import Recorder, make_recorder, no_recorder
from esper_soa.training.loop.task_files import TaskFiles, place_of
from esper_soa.training.results.final_table import SEED_EVENTS, Speed, Summary
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import LOGGER, Progress
from esper_soa.training.results.totals import RunTotals
from esper_soa.training.results.verdict import Episode, HostScore, control_text
from esper_soa.vocabulary import NUM_BLUEPRINTS


class TaskRun:
    """One task of a run. Where ranks share out the envs, each has one, all alike."""

    def __init__(
        self,
        cfg: TrainConfig,
        session: Session,
        world: World,
        player: Player,
        ranks: Ranks,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """cfg, session: as if the task were alone. callbacks: beside the settings' own."""
        self.cfg = cfg
        self.session = session
        self.folder = session.folder
        self.world = world
        self.player = player
        self.files = TaskFiles(cfg, session, world, ranks=ranks)
        self.callbacks = make_callbacks(cfg.track, cfg.report, callbacks, ops=cfg.effects.ops)
        self.totals = RunTotals()
        self.before = RunTotals()  # the rounds that earlier processes did
        # By name of a control, the last rounds as it played them.
        self.controls: dict[str, list[RoundResult]] = {}

    def restore(self, saved: SavedTask) -> None:
        """Continue after the rounds of `saved`."""
        self.totals = saved.progress
        self.before = copy(saved.progress)

    def content(self) -> dict:
        """The part of the task in a checkpoint, see SavedTask."""
        return {"progress": asdict(self.totals), "data": origin(self.world.data)}

    def label(self, text: str) -> str:
        """The name of a part of the run on the progress bar."""
        return f"{text} {self.session.part}".rstrip()

    def announce(self) -> None:
        """Say on the console which data, hosts, policy and memory; the rest goes to the log."""
        cfg = self.cfg
        rules = self.world.rules
        shape = rules.setup.shape
        task = self.world.setup.task
        host = task.host_name + " of your own" * is_reference(task.host)
        slots = ", ".join(spec.name for spec in shape.slots)
        hosts = f"{self.world.setup.num_envs} x {host}, {rules.reward.counts.host:,} parameters"
        rounds = f"{cfg.rounds} round{'s' * (cfg.rounds > 1)} of {cfg.steps} env-steps"
        work = rules.setup.train_samples, rules.setup.val_samples
        if not self.world.split and work != (cfg.train_samples, cfg.val_samples):
            rounds += f", train_samples={work[0]} and val_samples={work[1]} as images are few"
        init = cfg.policy.init if cfg.policy.name == "ppo" else SCRATCH
        start = f" from {init}" * (init != SCRATCH)
        sources = {entry.source.identity: entry.source for entry in sets_of(self.world.data)}
        for data in sources.values():
            level = WARNING if data.source.startswith(SUBSET_WORDS) else INFO
            name = "" if data.source.startswith(data.name) else f"{data.name}: "
            LOGGER.log(level, "data     %s%s", name, data.source)
            if isinstance(data, ImageSet) and data.num_classes is not None:
                for finding in check_images(data):
                    LOGGER.warning("data     %s", finding)
        LOGGER.info("hosts    %s, slots %s; %s", hosts, slots, rounds)
        for blueprint in shape.blueprints:
            if blueprint.code >= NUM_BLUEPRINTS:
                LOGGER.info("seeds    %s of your own, code %d", blueprint.name, blueprint.code)
        for finding in self.part_findings():
            LOGGER.warning("parts    %s", finding)
        policy = f"{cfg.policy.name}{start}, reward {'+'.join(cfg.reward.modes)}"
        LOGGER.info("policy   %s, on %s", policy, place_of(self.world))
        minibatches = cfg.policy.ppo.minibatches
        if cfg.policy.name == "ppo" and minibatches > cfg.envs:
            numbers = f"policy.ppo.minibatches={minibatches} is more than envs={cfg.envs}"
            LOGGER.warning("policy   %s: one minibatch per env", numbers)
        LOGGER.info("memory   %s", needs_in_words(self.world.setup, cfg.policy, rules.engine))
        self.log_details()

    def part_findings(self) -> list[str]:
        """Faults of users' parts that a run does not refuse; none without that part of the lab."""
        task = self.world.setup.task
        modes = self.cfg.reward.modes
        with suppress(UserError):
            if any(map(is_reference, [task.host, *task.blueprints, *modes])):
                check_parts = find_in_lab("users' parts", "a run")
                return cast(list[str], check_parts(self.world, modes))
        return []

    def log_details(self) -> None:
        """Write to the log how samples are prepared, the work, and what computes it."""
        setup = self.world.setup
        engine = self.world.rules.engine.chosen
        replay = self.world.kernels.replay
        device = self.world.device
        samples = f"V={setup.val_samples} validation {self.world.data.spec.name}"
        each = f"of every host per env-step, in batches of {setup.batch_size}"
        for note in self.world.data.notes:
            LOGGER.debug("data     %s", note)
        LOGGER.debug("work     T=%d training and %s %s", setup.train_samples, samples, each)
        LOGGER.debug("compute  %s", layout_in_words(device, setup.workers, setup.env_chunk))
        precision = choose_precision(setup.compute.precision, device)
        LOGGER.debug("numbers  hosts compute in %s: %s", precision.name, precision.reason)
        LOGGER.log(WARNING if engine.fallback else DEBUG, "kernels  %s", engine.reason)
        for obstacle in engine.tried:
            LOGGER.debug("kernels  %s", obstacle)
        LOGGER.debug("state    kernels of the env state: %s", self.world.kernels.reason)
        LOGGER.debug("graphs   %s", replay.reason)
        for left_out in replay.left_out:
            LOGGER.warning("graphs   %s", left_out)

    def log(
        self, result: RoundResult, seconds: dict[str, float], learning: dict[str, Json]
    ) -> dict[str, Json]:
        """Count a round, and append its lines to episodes.jsonl and metrics.jsonl; returns that of
        metrics.jsonl.

        seconds: collect_seconds and update_seconds; learning: diagnostics and anomalies. The hosts
        of a round that the final table is of are measured on the test images, which counts for
        neither. Raises IncompleteError where the folder is open to another run.
        """
        totals = self.totals
        if totals.rounds_done >= self.cfg.rounds - self.cfg.control_rounds:
            result = with_test(self.world, result)
        told_before = totals.rewards_not_finite
        totals.add(
            result,
            sum(seconds.values()),
            env_steps=self.cfg.round_env_steps,
            keep=self.cfg.control_rounds,
        )
        number = totals.rounds_done
        if result.warning and told_before == 0:
            remedy = "PPO leaves such env-steps out; metrics.jsonl counts them in every round"
            LOGGER.warning("round %d  %s. %s", number, result.warning, remedy)
        metrics: dict[str, Json] = {
            "round": number,
            "env_steps": totals.env_steps(self.cfg.round_env_steps),
            **result.record,
            "pareto": asdict(totals.pareto()),
            "eps": result.env_steps / sum(seconds.values()),
            **seconds,
            **learning,
        }
        episodes = [
            {"round": number, "env": env} | record for env, record in enumerate(result.episodes)
        ]
        self.files.write_round(episodes, metrics)
        return metrics

    def play_controls(self, progress: Progress) -> None:
        """Play the last rounds with every control; env-steps of the first are recorded."""
        cfg = self.cfg
        recent = self.totals.recent
        ranks = self.files.ranks
        record: Callable[[World], Recorder] = partial(
            make_recorder, cfg.telemetry, session=self.session, ranks=ranks, control=True
        )
        for name in cfg.controls:
            play = partial(play_control, name, cfg, self.world, ranks=ranks, record=record)
            label = self.label(control_text(name))
            self.controls[name] = [
                play(grown=hosts, request=Round(number, progress, label))
                for number, hosts in enumerate(recent, self.totals.rounds_done - len(recent))
            ]
            record = no_recorder

    def score(self, name: str, rounds: Sequence[GrownHosts]) -> HostScore:
        """The rounds of the player `name` for the final table; all pay rent by the run's host."""
        episodes = []
        for played, grown in zip(rounds, self.totals.recent, strict=True):
            rents = self.world.final_rents(played.parameters, played.train_flop, grown.settings)
            unknown = [math.nan] * len(played.accuracies)
            tested = list(played.test_accuracies) or unknown
            episodes.append(
                Episode(
                    validation_accuracies=played.accuracies,
                    test_accuracies=tested,
                    parameters=played.parameters,
                    nets=list(map(sub, tested, rents)),
                    train_flop=played.train_flop,
                    test_losses=list(played.test_losses) or unknown,
                    settings=grown.settings,
                    all_flop=list(played.all_flop) or unknown,
                    num_steps=played.num_steps,
                    validation_losses=list(played.validation_losses) or unknown,
                    answers=[] if played.answers is None else list(played.answers.cpu().numpy()),
                )
            )
        return HostScore(name, episodes, self.world.data.spec.num_targets)

    def summarise(self) -> Summary:
        """The record of the final table and of summary.json."""
        cfg = self.cfg
        work = cfg if self.world.split else self.world.setup
        totals = self.totals
        data = self.world.data
        recorder = self.files.recorder
        dropped = {"tables": recorder.dropped} if recorder.dropped else {}
        return Summary(
            name=cfg.name,
            task=self.world.setup.task.host_name,
            policy=cfg.policy.name,
            data=f"{data.name} ({data.source})",
            device=place_of(self.world),
            envs=cfg.envs,
            rounds=cfg.rounds,
            steps=cfg.steps,
            grown=self.score(cfg.policy.name, totals.recent),
            controls=[self.score(name, rounds) for name, rounds in self.controls.items()],
            budget=cfg.control_budget,
            perplexity=data.spec.perplexity,
            test_images=len(data.test_labels),
            validation_images=len(data.val_labels),
            seeds={name: totals.seeds[name] for name in SEED_EVENTS},
            reward=sum(totals.rewards) / len(totals.rewards),
            speed=Speed(
                env_steps=totals.env_steps(cfg.round_env_steps),
                seconds=totals.seconds,
                train_samples=work.train_samples,
                val_samples=work.val_samples,
                alpha_rows=totals.alpha_rows / totals.rounds_done,
            ),
            wall_seconds=time.monotonic() - self.session.begin,
            pareto=totals.pareto(),
            rollbacks=totals.seeds.get("rollbacks", 0),
            rounds_before=self.before.rounds_done,
            env_steps_before=self.before.env_steps(cfg.round_env_steps),
            samples=data.spec.name,
            policy_init=cfg.policy.init if cfg.policy.name == "ppo" else SCRATCH,
            telemetry={
                "level": cfg.telemetry.level,
                "env_steps": recorder.env_steps,
                "dropped": dropped | self.files.lost,
            },
        )
