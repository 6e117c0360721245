"""A run in progress: its tasks, the policy that plays them all, and its checkpoints."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from signal import Signals
from statistics import fmean

from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.system.plain_files import remove
from esper_soa.system.signals import STOP_SIGNALS, Interrupted
from esper_soa.system.versions import package_versions
from esper_soa.training.files.checkpoint import save_checkpoint
from esper_soa.training.files.run_folder import rounds_of, write_config, write_versions
from esper_soa.training.files.saved_run import SavedRun
from esper_soa.training.files.session import Session
from esper_soa.training.loop import resume
from esper_soa.training.loop.build import build_worlds, make_setup, world_facts
from esper_soa.training.loop.callbacks import Callback
from esper_soa.training.loop.players import build_players
from esper_soa.training.loop.task import TaskRun
from esper_soa.training.results.anomalies import Watch
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.profile import make_profile
from esper_soa.training.results.progress import LOGGER

NEWEST_CHECKPOINT = "the newest checkpoint"  # its name in messages


class Run:
    """A run in progress. Where ranks share out the envs, each has one, all alike."""

    def __init__(
        self,
        cfg: TrainConfig,
        session: Session,
        *,
        resumed: bool = False,
        ranks: Ranks = SINGLE_PROCESS,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """resumed: whether `restore` comes next. callbacks: those beside the settings' own."""
        self.cfg = cfg
        self.session = session
        self.folder = session.folder
        self.ranks = ranks
        self.device = resolve_device(cfg.device, ranks.local_rank)
        by_task = cfg.by_task
        setups = [make_setup(task, self.device, ranks) for task in by_task.values()]
        apply_threads(setups[0].compute.threads)
        worlds = list(map(build_worlds, by_task.values(), setups, repeat(ranks)))
        players = build_players(cfg.policy, worlds, resumed)
        self.learner = players[0].learner
        self.tasks: dict[str, TaskRun] = {}
        for (name, task), world, player in zip(by_task.items(), worlds, players, strict=True):
            # a task that is alone has the folder of the run
            part = session.within(name) if cfg.worlds else session
            self.tasks[name] = TaskRun(
                task, part, world, player=player, ranks=ranks, callbacks=callbacks
            )
        self.watch = Watch(cfg.telemetry.anomaly)
        self.profile = make_profile(cfg.profile, self.device, self.folder.path)
        self.best_accuracy = -math.inf  # see SavedRun
        self.kernels_told = self._kernel_reasons()
        self.saved = -1  # rounds done at the newest checkpoint that this process wrote
        self.remember()

    @property
    def rounds_done(self) -> int:
        """Rounds done, of all tasks."""
        return next(iter(self.tasks.values())).totals.rounds_done

    def restore(self, checkpoint_run: SavedRun, path: Path) -> None:
        """Continue from `checkpoint_run`; files of later rounds are cut back."""
        for name, task in self.tasks.items():
            resume.check_data(checkpoint_run.task(name), task.world.data)
        if self.learner is not None:
            resume.restore_learner(self.learner, checkpoint_run, path)
        for name, task in self.tasks.items():
            task.restore(checkpoint_run.task(name))
        self.watch = Watch(self.cfg.telemetry.anomaly, checkpoint_run.watch)
        self.set_level()
        self.best_accuracy = checkpoint_run.best_accuracy
        self.remember()
        done = self.rounds_done
        LOGGER.info("resume   %s: %d of %d rounds are done", path.name, done, self.cfg.rounds)
        self.truncate(done)
        if self.ranks.first:
            with self.session.write_errors.attempt(self.folder.config.name):
                write_config(self.folder, settings_yaml(self.cfg))
        for change in resume.check_settings(checkpoint_run, self.cfg):
            LOGGER.info("resume   changed %s", change)
        other_versions = list[str]()
        for task in self.tasks.values():
            engine = task.world.rules.engine.chosen.name
            other_versions += resume.version_changes(checkpoint_run, task.folder, engine)
        for change in dict.fromkeys(other_versions):
            LOGGER.warning("resume   changed %s", change)

    def truncate(self, rounds: int) -> None:
        """Drop what later rounds wrote; raises UserError where a folder cannot be written."""
        if self.ranks.first:
            resume.drop_checkpoints(self.folder, rounds)
        for task in self.tasks.values():
            task.files.truncate(rounds)

    def write_records(self) -> None:
        """Write versions.json, and what else the folder of each of several tasks begins with."""
        for task in self.tasks.values():
            task.files.write_records()
        if self.cfg.worlds:
            facts = {name: world_facts(task.world) for name, task in self.tasks.items()}
            with self.session.write_errors.attempt(self.folder.versions.name):
                write_versions(self.folder, str(self.device), {"tasks": facts})

    def _kernel_reasons(self) -> list[str]:
        return [task.world.kernels.reason for task in self.tasks.values()]

    def tell_kernels(self) -> None:
        """Log and write down which step kernels the newest round has taken, where it has."""
        reasons = self._kernel_reasons()
        if reasons != self.kernels_told and self.ranks.first:
            for reason in reasons:
                LOGGER.debug("state    kernels of the env state: %s", reason)
            self.write_records()
        self.kernels_told = reasons

    def remember(self) -> None:
        """Take the content of a checkpoint of this moment (SavedRun); what changes is copied."""
        learner = self.learner
        state = None
        if learner is not None:
            weights = learner.policy.state_dict()
            copies = {name: weight.clone() for name, weight in weights.items()}
            state = learner.state_dict() | {"policy": copies}
        self.content: dict = {
            "tasks": {name: task.content() for name, task in self.tasks.items()},
            "settings": asdict(self.cfg),
            "versions": package_versions(),
            "watch": asdict(self.watch),
            "best_accuracy": self.best_accuracy,
            "learner": state,
        }
        self.rounds_held = self.rounds_done  # when the content was taken

    def escalate(self, anomaly: bool) -> None:
        """Count a round; where an `anomaly` began in it, those that follow are recorded in full,
        telemetry.escalation of them.
        """
        rounds = self.cfg.telemetry.escalation if anomaly else 0
        self.watch.escalate(rounds)
        self.set_level()
        done = self.rounds_done
        last = min(done + rounds, self.cfg.rounds)
        if last > done:
            LOGGER.info("tables   rounds %d to %d are recorded at level full", done + 1, last)

    def set_level(self) -> None:
        """Have the round to come recorded as the watch has it."""
        full = self.watch.full_rounds > 0 and self.cfg.telemetry.escalation > 0
        for task in self.tasks.values():
            task.files.recorder.escalate(full)

    def save_best(self, results: Sequence[RoundResult]) -> None:
        """Save the policy, before its update, where its round has the best mean over tasks."""
        means = [math.fsum(result.accuracies) / len(result.accuracies) for result in results]
        accuracy = fmean(means)
        if self.learner is not None and accuracy > self.best_accuracy:
            self.best_accuracy = accuracy
            if self.ranks.first:
                with self.session.write_errors.attempt(self.folder.best.name):
                    save_checkpoint(self.folder.best, self.content)

    def save_round(self, results: Sequence[RoundResult]) -> None:
        """Save what is due after the newest round, which has ended with these hosts."""
        self.tell_kernels()
        number = self.rounds_done
        every = self.cfg.checkpoint_every
        due = bool(every) and number % every == 0
        for task, result in zip(self.tasks.values(), results, strict=True):
            task.files.save_best(result.hosts, number)
            if due or number == self.cfg.rounds:
                task.files.save_hosts(result.hosts, number)
        if due:
            self.save()
        for task in self.tasks.values():
            task.files.look_for_files()

    def save(self) -> None:
        """Save the checkpoint of the rounds done, once, and drop what is too old, tasks' files too.

        A full disk costs the checkpoint, not the run; older ones stay.
        """
        if self.saved == self.rounds_held or not self.ranks.first:
            return
        for task in self.tasks.values():
            task.files.recorder.flush()
        with self.session.write_errors.attempt(NEWEST_CHECKPOINT):
            save_checkpoint(self.folder.checkpoint(self.rounds_held), self.content)
            self.saved = self.rounds_held
            for old in self.folder.checkpoints()[: -self.cfg.checkpoint_keep]:
                remove(old)
            oldest = min(map(rounds_of, self.folder.checkpoints()), default=0)
            for task in self.tasks.values():
                task.files.remove_old_networks(oldest)

    def handle_signals(self) -> None:
        """Do what signals ask for, between two env-steps; raises Interrupted to stop.

        Where another program handles a signal, its handler is called after the checkpoint is saved;
        the run continues unless that raises.
        """
        self.session.check_console()
        requests = self.session.requests
        for number in requests.waiting():
            self.save()
            stop = Interrupted(number, str(self.session.write_errors))
            rounds_text = f"{self.rounds_held} of {self.cfg.rounds} rounds are saved."
            saved = f"{rounds_text} Go on with resume={self.folder.path}"
            LOGGER.info("%s: %s", Signals(number).name, stop.unsaved or saved)
            if not requests.handle(number) and number in STOP_SIGNALS:
                raise stop

    def close(self) -> None:
        """Close the callbacks of all tasks."""
        with ExitStack() as stack:
            for task in self.tasks.values():
                for callback in reversed(task.callbacks):
                    stack.callback(callback.close)
