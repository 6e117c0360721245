"""A job of a sweep: in a process of its own, watched by the launcher's, with a record of its end.

Launchers call `run_job` in place of the task of the command. Hydra's own and Ray's give several
jobs to one process, so that one that is killed would take others along: there a job is
`python -m esper_soa.lab.sweep.jobs`, and what is left in the launcher's process waits for it, hands
signals on and records how it ended; side_by_side.py waits for several. Submitit gives every job a
process, where the job runs, as that is where submitit's handlers queue it again. A job that fails
returns None. Needs no torch.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias, cast

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from esper_soa.config.compose import job_settings
from esper_soa.config.settings import EvaluateConfig, evaluation_from
from esper_soa.lab.run_folders import finished_accuracy, resumes
from esper_soa.lab.sweep.plugins import check_job, has_separate_process, is_search
from esper_soa.lab.sweep.records import JobRecord, Status, read_records, save_record
from esper_soa.lab.sweep.resolvers import register_resolvers
from esper_soa.system import signals
from esper_soa.system.console import KNOWN_ERRORS, safe_streams
from esper_soa.system.errors import PrunedError, UserError, single_line
from esper_soa.training.start.job import job_folder

if TYPE_CHECKING:
    from esper_soa.training.loop.callbacks import Callback

# Given the composed settings and callbacks of the run; returns what the sweeper maximises.
Task: TypeAlias = Callable[..., float | None]

register_resolvers()  # in every process that runs a job


def this_job() -> JobRecord:
    """The job that Hydra has begun in this process."""
    context = HydraConfig.get()
    return JobRecord(int(context.job.num), list(context.overrides.task), context.runtime.output_dir)


def run_job(task: Task, composed: DictConfig) -> float | None:
    """Run the job that Hydra has begun; what sweepers maximise, None where it did not end."""
    job = next_job(composed)
    if job.status != Status.BEGUN:
        return job.value
    if has_separate_process(HydraConfig.get()):
        return run_here(task, composed)
    return watch(task, composed, Path(HydraConfig.get().sweep.dir), job=job)


def next_job(composed: DictConfig) -> JobRecord:
    """The record, which is saved, of the job that Hydra has begun; it has ended where there is
    nothing to run.
    """
    sweep = Path(HydraConfig.get().sweep.dir)
    job = this_job()
    try:
        ended = finished_record(composed, job, read_records(sweep, job.number).get(job.number))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        ended = job.ended(Status.FAILED, message=single_line(error))
    save_record(sweep, ended or job)
    return ended or job


def finished_record(
    composed: DictConfig, job: JobRecord, before: JobRecord | None
) -> JobRecord | None:
    """The record of a job that an earlier call has ended; None for one to be run.

    before: what that call has recorded. Raises UserError for what a job of a sweep cannot have.
    """
    if OmegaConf.get_type(composed) is EvaluateConfig:
        evaluation_from(composed)
        return None
    settings = job_settings(composed)
    check_job(HydraConfig.get(), settings)
    folder = job_folder()
    accuracy = finished_accuracy(folder, settings)
    if accuracy is not None:
        print(f"job {job.number} is done already: {folder.path}")
        return job.ended(Status.DONE, accuracy)
    if before is not None and before.status == Status.PRUNED and resumes(folder, settings):
        print(f"job {job.number} was {before.message}: {folder.path}")
        return before
    return None


def run_here(task: Task, composed: DictConfig) -> float | None:
    """Run the job in this process and keep its record; raises what is no message of ours."""
    job = this_job()
    ended = job
    try:
        ended = job.ended(Status.DONE, task(composed, *pruner(composed)))
    except PrunedError as error:
        print(f"job {job.number} is {error}")
        ended = job.ended(Status.PRUNED, error.accuracy, str(error))
    except KNOWN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        ended = job.ended(Status.FAILED, message=single_line(error))
    finally:
        cause = sys.exception()
        if ended is job and isinstance(cause, SystemExit):
            asked = isinstance(cause, signals.Interrupted)
            reason = single_line(cause) if asked else "stopped by the launcher"
            ended = job.ended(Status.STOPPED, message=reason)
        elif ended is job:
            ended = job.ended(
                Status.FAILED, message=f"{type(cause).__name__}: {single_line(cause)}"
            )
        save_record(Path(HydraConfig.get().sweep.dir), ended)
    return ended.value


def pruner(composed: DictConfig) -> tuple["Callback", ...]:
    """The pruner of a search; none in other sweeps, and for several ranks or tasks."""
    hydra = HydraConfig.get()
    if not is_search(hydra) or composed.ranks > 1 or len(composed.tasks) > 1:
        return ()
    with signals.torch_import_guard():
        from esper_soa.lab.sweep.pruner import Pruner  # needs the extra `sweep`
    return (Pruner(hydra),)


def watch(task: Task, composed: DictConfig, sweep: Path, job: JobRecord) -> float | None:
    """Run the job in a process of its own; raises Interrupted where asked to stop meanwhile."""
    process = begin(task, composed)
    with handing_on([process.running]):
        return finish(process, sweep, job)


class JobProcess(NamedTuple):
    """The process of a job, and what it reads before it begins."""

    running: subprocess.Popen[bytes]
    message: bytes


def begin(task: Task, composed: DictConfig) -> JobProcess:
    """Start a process for the job that Hydra has begun.

    It has a session of its own: Ctrl-C reaches it once, from here. It stops when its standard input
    ends, as it does with this process. (Not by multiprocessing, which cannot start processes within
    those of other launchers.)
    """
    context = OmegaConf.to_container(HydraConfig.get(), resolve=False)
    message = pickle.dumps((task, composed, context))
    process = subprocess.Popen(
        [sys.executable, "-m", "esper_soa.lab.sweep.jobs"],
        stdin=subprocess.PIPE,
        cwd=HydraConfig.get().runtime.cwd,
        start_new_session=True,
    )
    return JobProcess(process, message)


@contextmanager
def handing_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Signals that come in the context reach the processes, too; yields those that ask for the end,
    and raises Interrupted for them at its own.
    """
    stops: list[int] = []

    def hand_on(number: int) -> None:
        if number in signals.STOP_SIGNALS:
            stops.append(number)
        for process in processes:
            process.send_signal(number)

    with signals.signal_handlers(hand_on, (*signals.STOP_SIGNALS, signals.SAVE_SIGNAL)):
        yield stops
    if stops:
        raise signals.Interrupted(stops[-1])


def finish(process: JobProcess, sweep: Path, job: JobRecord) -> float | None:
    """Wait for the end of the job and record it where the job could not; what sweepers maximise."""
    # a job that ended at once reads nothing, and closing its input says so; its status says how
    with suppress(BrokenPipeError), process.running:
        stdin = cast(BinaryIO, process.running.stdin)
        with suppress(BrokenPipeError):
            stdin.write(process.message)
            stdin.flush()
        status = process.running.wait()
    record = read_records(sweep, job.number).get(job.number, job)
    if record.status == Status.BEGUN:  # it had no time to say how it ended
        ending = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        record = job.ended(Status.KILLED, message=f"its process was ended {ending}")
        save_record(sweep, record)
        print(f"error: job {job.number}: {record.message}", file=sys.stderr)
    return record.value


def _stop_with_parent() -> None:
    """Ask this process to stop when its standard input ends, as it does with the holder's end."""
    while os.read(0, 1):  # not by sys.stdin, whose lock a thread must not hold as Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the job that standard input holds."""
    with safe_streams(), signals.stop_at_once():
        with signals.import_guard():
            task, composed, context = pickle.load(sys.stdin.buffer)
        setup_globals()
        HydraConfig.instance().cfg = cast(HydraConf, OmegaConf.create({"hydra": context}))
        Thread(target=_stop_with_parent, daemon=True).start()
        run_here(task, composed)


if __name__ == "__main__":
    main()
