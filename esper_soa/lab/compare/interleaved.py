"""Several runs in one process that take turns round by round, so that all meet the same conditions.

Every run has its own world, policy, normaliser and folder, so that it is the run that it would be
alone, to the bit; they share the process, one after the other, and so its memory at a time.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TypeAlias

import torch

from esper_soa.config.errors import RunMemoryError, UserError
from esper_soa.config.settings import TrainConfig
from esper_soa.runtime.files import IncompleteError
from esper_soa.runtime.signals import Interrupted, collect_signals
from esper_soa.training.running import Run
from esper_soa.training.session import quiet_warnings, session
from esper_soa.training.start import begin_run, make_run_folder
from esper_soa.training.trainer import finish_run, start_run, train_rounds

# Is told the round, from 1, and the runs in the order of their turns.
TurnBegins: TypeAlias = Callable[[int, list[str]], None]


def train_interleaved(
    runs: Mapping[str, tuple[TrainConfig, list[str]]], turn_begins: TurnBegins
) -> dict[str, str]:
    """Train the runs, each by its settings, which its overrides made, a round of each at a time.

    Those that are behind play, in the order given and its reverse by turns. A run that cannot go
    on, or lacks a file at its end, does not end the others: the result says why, by the run's name.
    An interrupt ends all with a checkpoint; raises Interrupted.
    """
    failed = dict[str, str]()
    turns = dict[str, Generator[Run, None, None]]()
    jobs = dict[str, Run]()  # that have not come to their end
    threads = torch.get_num_threads()
    with ExitStack() as stack, quiet_warnings():
        stack.callback(torch.set_num_threads, threads)
        for name, (settings, overrides) in runs.items():
            turns[name] = stack.enter_context(closing(_rounds(settings, overrides)))
            with _record_failure(failed, name):
                jobs[name] = next(turns[name])
        requests = stack.enter_context(collect_signals())
        for job in jobs.values():
            job.session.requests = requests
        while jobs:
            rounds_done = min(job.totals.rounds_done for job in jobs.values())
            due = [name for name, job in jobs.items() if job.totals.rounds_done == rounds_done]
            due = due[:: -1 if rounds_done % 2 else 1]
            begins = [name for name in due if rounds_done < jobs[name].cfg.rounds]
            if begins:
                turn_begins(rounds_done + 1, begins)
            for name in due:
                with _record_failure(failed, name), _save_on_interrupt(jobs, name):
                    if next(turns[name], None) is not None:
                        continue
                del jobs[name]
    return failed


@contextmanager
def _save_on_interrupt(jobs: Mapping[str, Run], playing: str) -> Iterator[None]:
    """Write a checkpoint of all but the `playing` one, which has its own, where interrupted."""
    try:
        yield
    except Interrupted:
        for job in (jobs[name] for name in jobs.keys() - {playing}):
            with job.session.logging_output():
                job.output.save()
        raise


def _rounds(settings: TrainConfig, overrides: list[str]) -> Generator[Run, None, None]:
    """The run, once it is start_run and after every round; sums it up behind the last."""
    with session(make_run_folder(settings, settings.run_dir), speaking=False) as run_session:
        with run_session.logging_output():
            job = start_run(run_session, settings, begin_run(run_session, settings, overrides))
        yield job
        with closing(job.output.callbacks), closing(train_rounds(job)) as rounds:
            while True:
                with run_session.logging_output():
                    job.activate()
                    if next(rounds, None) is None:
                        finish_run(job)
                        return
                yield job


@contextmanager
def _record_failure(failed: dict[str, str], name: str) -> Iterator[None]:
    """Note under `name` what ends the context early, where it is one that ends a single run."""
    try:
        yield
    except (UserError, IncompleteError, RunMemoryError) as error:
        failed[name] = str(error)
