"""The training loop: build everything from the settings, then collect, update, log and save.

A round is one episode of every env followed by one policy update, where the policy learns. A round
that is interrupted counts for nothing: the resumed run plays it again from its start.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from esper_soa.agent.rollout import Rollout
from esper_soa.config.errors import (
    PrunedError,
    RankLostError,
    RunMemoryError,
    UserError,
    check,
    error_text,
)
from esper_soa.config.settings import TrainConfig
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.memory import memory_errors
from esper_soa.runtime.ranks import ALONE, Ranks
from esper_soa.runtime.signals import collect_signals
from esper_soa.training import resume
from esper_soa.training.build import world_facts
from esper_soa.training.callbacks import Callback
from esper_soa.training.collect import Player, Round, play_round
from esper_soa.training.final_table import Summary, print_summary, write_summary
from esper_soa.training.progress import LOGGER, Progress
from esper_soa.training.run_folder import damaged_newer, write_versions
from esper_soa.training.running import Run, wants_control
from esper_soa.training.session import Session


def train_rounds(run: Run) -> Generator[int, None, None]:
    """Collect, update, log and save in every round that is left, then play the control's rounds.

    Yields the number of rounds done after every round. Raises RunMemoryError where memory runs out.
    """
    output = run.output
    with memory_errors(RunMemoryError), progress_bar(run) as progress, output.open():
        output.callbacks.on_run_start(run)
        for number in range(run.totals.rounds_done, run.cfg.rounds):
            label = f"round {number + 1}/{run.cfg.rounds}"
            imitates = number < run.cfg.policy.imitation.rounds
            player = run.player if imitates else run.player._replace(teacher=None)

            # Collect: an episode of every env.
            begin = time.monotonic()
            run.profile.on_phase_end("files")
            request = Round(number, progress, label, run.profile, None, output.recorder)
            result, rollout = play_round(run.world, player, request)
            collect_seconds = time.monotonic() - begin
            run.save_best(result)
            run.profile.on_phase_end("files")

            # Update: the policy learns from it.
            begin = time.monotonic()
            update = learn(player, rollout)
            del rollout  # its memory is for that of the next round
            seconds = {
                "collect_seconds": collect_seconds,
                "update_seconds": time.monotonic() - begin,
            }
            run.profile.on_phase_end("update")
            run.profile.report(label)

            # Log.
            metrics, episodes = run.count(result, update, seconds)
            output.log(metrics, episodes)

            # Save.
            output.save_round(number + 1, result.hosts)
            output.callbacks.on_round_end(run, metrics)
            run.handle_signals()
            yield number + 1
        output.save()
        output.networks.measure_best()
        run.play_control(progress)
        output.lost = output.callbacks.finish()


def learn(player: Player, rollout: Rollout | None) -> dict[str, float]:
    """Update the policy; returns diagnostics. A player with a teacher imitates it."""
    if player.learner is None or rollout is None:
        return {}
    taught = player.teacher is not None
    return player.learner.imitate(rollout) if taught else player.learner.update(rollout)


def progress_bar(run: Run) -> Progress:
    """The bar over all env-steps of the run, earlier ones and those of the control included."""
    cfg = run.cfg
    rounds = cfg.rounds + (min(cfg.control_rounds, cfg.rounds) if wants_control(cfg) else 0)
    total = rounds * cfg.envs * cfg.steps - run.totals.cut_off
    done = run.totals.env_steps(cfg)
    bar = run.session.progress(total, cfg.telemetry, done, run.handle_signals)
    bar.below = run.output.recorder.table
    return bar


def run_in_session(
    session: Session,
    cfg: TrainConfig,
    checkpoint: Path | None,
    ranks: Ranks = ALONE,
    callbacks: Sequence[Callback] = (),
) -> Summary:
    """Run the whole job, from `checkpoint` on where given; returns the record of the final table.

    ranks: the processes that share out its envs, of which the first writes. callbacks: those beside
    the ones that the settings ask for.

    Raises Interrupted where a signal stopped it, after saving a checkpoint; and at its end
    IncompleteError where something could not be written. PrunedError where a search gave it up, and
    RankLostError where another rank ended early, after saving a checkpoint. RunMemoryError where
    memory ran out.
    """
    run = start_run(session, cfg, checkpoint, ranks, callbacks)
    with closing(run.output.callbacks):
        try:
            with collect_signals() as session.requests:
                try:
                    for _ in train_rounds(run):
                        pass
                except Exception as error:
                    # a compiler, say, that the same signal has ended
                    if session.requests.stop and ranks is ALONE:
                        LOGGER.debug("stopped while %s", error_text(error))
                        run.handle_signals()
                    raise
        except (PrunedError, RankLostError):
            run.output.save()
            raise
        return finish_run(run)


def start_run(
    session: Session,
    cfg: TrainConfig,
    checkpoint: Path | None = None,
    ranks: Ranks = ALONE,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """A run at its start, or at `checkpoint`, of the first rank; the log says what it will do.

    Raises UserError where it cannot continue from there, or memory does not suffice.
    """
    local_text = f"{ranks.count} here"
    check(cfg.ranks == ranks.count, "ranks", cfg.ranks, local_text, "esper-train starts ranks.")
    checkpoint = ranks.from_first(lambda: checkpoint)
    with memory_errors(UserError):
        checkpoint_run = None
        if checkpoint is not None:
            device = resolve_device(cfg.device if ranks.count == 1 else "cpu")
            checkpoint_run = ranks.from_first(partial(resume.read_run, checkpoint, device))
            for damaged in damaged_newer(checkpoint):
                LOGGER.warning("resume   %s", damaged)
            resume.check_settings(checkpoint_run, cfg)
        run = Run(cfg, session, checkpoint_run is not None, ranks, callbacks)
        if checkpoint_run is not None and checkpoint is not None:
            run.restore(checkpoint_run, checkpoint)
        elif cfg.resume and ranks.first:
            LOGGER.info("resume   no checkpoint was found: the run starts afresh")
            run.output.truncate(0)
        else:
            run.output.networks.truncate(0)
        if ranks.first:
            with session.write_errors.attempt(session.folder.versions.name):
                write_versions(session.folder, run.origin.place, world_facts(run.world))
    run.announce()
    return run


def finish_run(run: Run) -> Summary:
    """Sum up a run whose rounds are done; IncompleteError where something could not be written."""
    run.profile.close()
    summary = run.summarise()
    session = run.session
    if not run.output.writes:
        return summary
    with session.write_errors.attempt(run.folder.summary.name):
        write_summary(summary, run.folder.summary)
    print_summary(summary, session.console)
    run.output.callbacks.on_run_end(run, summary)
    LOGGER.info("files    %s", run.folder.path)
    session.finish()
    return summary
