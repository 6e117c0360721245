"""The main job: build everything from the settings, then collect, update, log and save, in rounds.

A round is one episode of every env followed by one policy update, where the policy learns. A round
that is interrupted counts for nothing: the resumed run plays it again from its start.
"""

from collections.abc import Generator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from esper_soa.config.errors import OutOfRoomError, RankLostError, UserError, check
from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.lab.report.page import leave_report
from esper_soa.lab.telemetry.recorder import recording
from esper_soa.nets.data.datasets import ImageSet
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.json_lines import MetricsWriter
from esper_soa.runtime.memory import naming_memory
from esper_soa.runtime.ranks import ALONE, Ranks
from esper_soa.runtime.signals import signals_noted
from esper_soa.training import resume
from esper_soa.training.build import world_facts
from esper_soa.training.final_table import Summary, print_summary, write_summary
from esper_soa.training.progress import LOGGER, Progress
from esper_soa.training.run_folder import RunFolder, passed_over, write_config, write_versions
from esper_soa.training.running import Run, wants_control
from esper_soa.training.session import Session, session


def ready(
    within: Session,
    cfg: TrainConfig,
    checkpoint: Path | None = None,
    images: ImageSet | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """A run at its start, or where `checkpoint`, of the first rank, stood, told in the log.

    Raises UserError where it cannot go on from there, or memory does not suffice.
    """
    here = f"{ranks.count} here"
    check(cfg.ranks == ranks.count, "ranks", cfg.ranks, here, "esper-train starts ranks.")
    checkpoint = ranks.from_first(lambda: checkpoint)
    with naming_memory(UserError):
        if checkpoint is not None:
            job = _resumed(cfg, within, checkpoint, images, ranks)
        else:
            if cfg.resume and ranks.first:
                LOGGER.info("resume   no checkpoint was found: the run starts afresh")
                resume.cut_back(within.folder, 0)
            job = Run(cfg, within, images=images, ranks=ranks)
            job.networks.go_back(0)
        if job.writes:
            with within.unwritten.noting(within.folder.versions.name):
                write_versions(within.folder, job.place, world_facts(job.world))
    job.announce()
    return job


def _resumed(
    cfg: TrainConfig, within: Session, checkpoint: Path, images: ImageSet | None, ranks: Ranks
) -> Run:
    """The run where `checkpoint` stood, which the first rank reads for all."""
    folder = within.folder
    device = resolve_device(cfg.device if ranks.count == 1 else "cpu")
    saved = ranks.from_first(partial(resume.read_run, checkpoint, device))
    for damaged in passed_over(checkpoint):
        LOGGER.warning("resume   %s", damaged)
    changed = resume.check_settings(saved, cfg)
    job = Run(cfg, within, True, images, ranks)
    job.restore(saved, checkpoint)
    if job.writes:
        with within.unwritten.noting(folder.config.name):
            write_config(folder, settings_yaml(cfg))
    for change in changed:
        LOGGER.info("resume   changed %s", change)
    engine = job.world.rules.engine.chosen.name
    for change in resume.version_changes(saved, folder, engine):
        LOGGER.warning("resume   changed %s", change)
    return job


def played(job: Run) -> Generator[int, None, None]:
    """Play all rounds that are left, each with its line and checkpoint, then the control's.

    Yields after every round the number of rounds done. Raises OutOfRoomError where memory ran out.
    """
    cfg = job.cfg
    noting = job.within.unwritten.noting
    logged = cfg.telemetry.level != "off" and job.writes
    paths = (job.folder.episodes, job.folder.metrics) if logged else ()
    with naming_memory(OutOfRoomError), progress_bar(job) as progress, ExitStack() as opened:
        files = [opened.enter_context(MetricsWriter(path)) for path in paths]
        job.recorder = opened.enter_context(
            recording(cfg, job.world, job.folder.path, job.within.unwritten, job.table, job.ranks)
        )
        tracking = opened.enter_context(closing(job.open_tracking()))
        for number in range(job.done.rounds_done, cfg.rounds):
            line, played = job.one_round(number, progress)
            tracking.log(line)
            for path, file, records in zip(paths, files, (played, [line]), strict=False):
                with noting(path.name):
                    file.write(*records)
                    file.sync()
            due = bool(cfg.checkpoint_every) and (number + 1) % cfg.checkpoint_every == 0
            if due or number + 1 == cfg.rounds:
                job.networks.keep()
            if due:
                job.write()
            job.heed()
            job.within.judge(number + 1, job.done.recent[-1].accuracies, job.write)
            yield number + 1
        job.write()
        job.play_control(progress)


def run(
    cfg: TrainConfig,
    folder: RunFolder,
    checkpoint: Path | None = None,
    images: ImageSet | None = None,
) -> Summary:
    """`run_within`, in a session of its own in `folder`."""
    with session(folder) as within:
        return run_within(within, cfg, checkpoint, images)


def run_within(
    within: Session,
    cfg: TrainConfig,
    checkpoint: Path | None,
    images: ImageSet | None = None,
    ranks: Ranks = ALONE,
) -> Summary:
    """Run the whole job, from `checkpoint` on where given; returns what the final table says.

    images: those that a program hands over, with data.name=given; else cfg.data says which. ranks:
    the processes that share out its envs, of which the first writes.

    Raises Interrupted where a signal stopped it, after writing a checkpoint; and at its end, with
    everything played and told, IncompleteError where something could not be written. PrunedError
    where a search gave it up, and RankLostError where another rank did not go on, after writing a
    checkpoint. OutOfRoomError where memory ran out.
    """
    job = ready(within, cfg, checkpoint, images, ranks)
    try:
        with signals_noted() as job.requests:
            for _ in played(job):
                pass
    except RankLostError:
        job.write()
        raise
    return ended(job)


def ended(job: Run) -> Summary:
    """Sum up a run that is played; raises IncompleteError where something could not be written."""
    within = job.within
    job.profile.close()
    summary = job.summarise()
    if not job.writes:
        return summary
    with within.unwritten.noting(within.folder.summary.name):
        write_summary(summary, within.folder.summary)
    print_summary(summary, within.console)
    if job.cfg.report:
        leave_report(within)
    LOGGER.info("files    %s", within.folder.path)
    within.finish()
    return summary


def progress_bar(job: Run) -> Progress:
    """What shows the env-steps of the run, those done before and those of the control included."""
    cfg = job.cfg
    rounds = cfg.rounds + (min(cfg.control_rounds, cfg.rounds) if wants_control(cfg) else 0)
    total = rounds * cfg.envs * cfg.steps - job.done.cut_off
    shown = job.within.progress(total, cfg.telemetry, job.env_steps, job.heed)
    shown.below = job.table
    return shown
