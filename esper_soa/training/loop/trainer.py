"""The training loop: build everything from the settings, then collect, update, log and save.

A round is one episode of every env of every task, followed by one policy update where the policy
learns. One that is interrupted counts for nothing: the resumed run plays it again.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from esper_soa.agent.rollout import Rollout
from esper_soa.config.settings import TrainConfig
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.memory import memory_errors
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.system import errors
from esper_soa.system.json_lines import Json
from esper_soa.system.signals import collect_signals
from esper_soa.training.files.run_folder import damaged_newer
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.files.session import Session
from esper_soa.training.loop import resume
from esper_soa.training.loop.callbacks import Callback
from esper_soa.training.loop.collect import Round, play_round
from esper_soa.training.loop.env_steps import step_recorder
from esper_soa.training.loop.run import Run
from esper_soa.training.loop.task import TaskRun
from esper_soa.training.results import final_table
from esper_soa.training.results.answers import write_answers
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import LOGGER, Progress


def train_rounds(run: Run) -> Generator[int, None, None]:
    """Collect, update, log and save in every round that is left, then play the controls' rounds.

    Yields the number of rounds done after every round. Raises RunMemoryError where memory runs out.
    """
    tasks = run.tasks.values()
    with memory_errors(errors.RunMemoryError), progress_bar(run) as progress, ExitStack() as files:
        for task in tasks:
            files.callback(task.files.close)
        for task in tasks:
            for callback in task.callbacks:
                callback.on_run_start(task)
        for number in range(run.rounds_done, run.cfg.rounds):
            # Collect: an episode of every env, one task after the other.
            played = [collect(run, task, number, progress=progress) for task in tasks]
            run.save_best([collected.result for collected in played])
            run.profile.on_phase_end("files")

            # Update: the policy learns from all of them.
            begin = time.monotonic()
            update = learn(run, played, number)
            # the memory of their rollouts is for those of the next round
            played = [collected._replace(rollout=None) for collected in played]
            seconds = time.monotonic() - begin
            run.profile.on_phase_end("update")
            run.profile.report(f"round {number + 1}/{run.cfg.rounds}")

            # Log.
            lines = log_round(run, played, update, seconds=seconds)

            # Save.
            run.save_round([collected.result for collected in played])
            for task, metrics in zip(tasks, lines, strict=True):
                for callback in task.callbacks:
                    callback.on_round_end(task, metrics)
            run.handle_signals()
            yield number + 1
        run.save()
        for task in tasks:
            task.files.measure_best()
            task.play_controls(progress)
            for callback in task.callbacks:
                task.files.lost |= callback.finish()


class Collected(NamedTuple):
    """A round of a task."""

    result: RoundResult
    rollout: Rollout | None  # None where nobody learns
    seconds: float


def collect(run: Run, task: TaskRun, number: int, progress: Progress) -> Collected:
    """Play round `number`, from 0, of a task."""
    begin = time.monotonic()
    run.profile.on_phase_end("files")
    progress.below = task.files.recorder.table
    label = task.label(f"round {number + 1}/{run.cfg.rounds}")
    imitates = number < run.cfg.policy.imitation.rounds
    player = task.player if imitates else task.player._replace(teacher=None)
    recorder = step_recorder(task.files.recorder, task, task.callbacks)
    request = Round(number, progress, label, profile=run.profile, topology=None, recorder=recorder)
    result, rollout = play_round(task.world, player, request)
    return Collected(result, rollout, time.monotonic() - begin)


def learn(run: Run, played: Sequence[Collected], number: int) -> dict[str, float]:
    """Update the policy with what was played in round `number`, from 0; returns diagnostics."""
    if run.learner is None:
        return {}
    rollouts = [collected.rollout for collected in played if collected.rollout is not None]
    imitates = number < run.cfg.policy.imitation.rounds
    return run.learner.imitate(*rollouts) if imitates else run.learner.update(*rollouts)


def log_round(
    run: Run, played: Sequence[Collected], update: dict[str, float], seconds: float
) -> list[dict[str, Json]]:
    """Count a round and write it down; returns the line of every task for metrics.jsonl."""
    begun = run.watch.look(update)
    for name, message in begun.items():
        LOGGER.warning("round %d  %s: %s", run.rounds_done + 1, name, message)
    learning: dict[str, Json] = {"update": update, "anomalies": run.watch.active}
    lines = []
    for task, collected in zip(run.tasks.values(), played, strict=True):
        times = {"collect_seconds": collected.seconds, "update_seconds": seconds / len(played)}
        lines.append(task.log(collected.result, times, learning))
    run.escalate(bool(begun))
    run.remember()
    return lines


def progress_bar(run: Run) -> Progress:
    """The bar over all env-steps of the run, earlier ones and those of controls included."""
    total = done = 0
    for task in run.tasks.values():
        cfg = task.cfg
        rounds = cfg.rounds + len(cfg.controls) * min(cfg.control_rounds, cfg.rounds)
        total += rounds * cfg.round_env_steps - task.totals.cut_off
        done += task.totals.env_steps(cfg.round_env_steps)
    return Progress(
        total,
        run.session.console,
        style=run.cfg.telemetry.progress,
        interval=run.cfg.telemetry.plain_interval,
        done=done,
        after_step=run.handle_signals,
    )


def run_in_session(
    session: Session,
    cfg: TrainConfig,
    checkpoint: Path | None,
    ranks: Ranks = SINGLE_PROCESS,
    callbacks: Sequence[Callback] = (),
) -> list[final_table.Summary]:
    """Run the whole job, from `checkpoint` on where given; returns the record of the final table of
    each task.

    ranks: the processes that share out its envs, of which the first writes. callbacks: those beside
    the ones that the settings ask for.

    Raises Interrupted where a signal stopped it, after saving a checkpoint; and at its end
    IncompleteError where something could not be written. PrunedError where a search gave it up, and
    RankLostError where another rank ended early, after saving a checkpoint. RunMemoryError where
    memory ran out.
    """
    run = start_run(session, cfg, checkpoint, ranks=ranks, callbacks=callbacks)
    with closing(run):
        try:
            with collect_signals() as session.requests:
                try:
                    for _ in train_rounds(run):
                        pass
                except Exception as error:
                    # a compiler, say, that the same signal has ended
                    if session.requests.stop and ranks is SINGLE_PROCESS:
                        LOGGER.debug("stopped while %s", errors.error_text(error))
                        run.handle_signals()
                    raise
        except (errors.PrunedError, errors.RankLostError):
            run.save()
            raise
        return finish_run(run)


def start_run(
    session: Session,
    cfg: TrainConfig,
    checkpoint: Path | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """A run at its start, or at `checkpoint`, of the first rank; the log says what it will do.

    Raises UserError where it cannot continue from there, or memory does not suffice.
    """
    if cfg.ranks != ranks.count:
        allowed = f"{ranks.count} here"
        raise errors.SettingError("ranks", cfg.ranks, allowed, remedy="esper-train starts ranks.")
    checkpoint = ranks.from_first(lambda: checkpoint)
    with memory_errors(errors.UserError):
        checkpoint_run = None
        if checkpoint is not None:
            device = resolve_device(cfg.device if ranks.count == 1 else "cpu")
            checkpoint_run = ranks.from_first(partial(read_run, checkpoint, device))
            for damaged in damaged_newer(checkpoint):
                LOGGER.warning("resume   %s", damaged)
            resume.check_settings(checkpoint_run, cfg)
        resumed = checkpoint_run is not None
        run = Run(cfg, session, resumed=resumed, ranks=ranks, callbacks=callbacks)
        if checkpoint_run is not None and checkpoint is not None:
            run.restore(checkpoint_run, checkpoint)
        elif cfg.resume and ranks.first:
            LOGGER.info("resume   no checkpoint was found: the run starts afresh")
            run.truncate(0)
        else:
            for task in run.tasks.values():
                task.files.begin()
        if ranks.first:
            run.write_records()
    for task in run.tasks.values():
        task.announce()
    return run


def finish_run(run: Run) -> list[final_table.Summary]:
    """Sum up a run whose rounds are done; IncompleteError where something could not be written."""
    run.profile.close()
    summaries = [task.summarise() for task in run.tasks.values()]
    if not run.ranks.first:
        return summaries
    session = run.session
    for task, summary in zip(run.tasks.values(), summaries, strict=True):
        with task.session.write_errors.attempt(task.folder.answers.name):
            write_answers(task.folder.answers, summary.grown, summary.controls)
        with task.session.write_errors.attempt(task.folder.summary.name):
            final_table.write_summary(summary, task.folder.summary)
        final_table.print_summary(summary, session.console)
        for callback in task.callbacks:
            callback.on_run_end(task, summary)
    if run.cfg.worlds:
        with session.write_errors.attempt(run.folder.summary.name):
            final_table.write_overview(summaries, run.folder.summary)
    LOGGER.info("files    %s", run.folder.path)
    session.finish()
    return summaries
