"""A job of a sweep: in a process of its own, watched by the launcher's, with a record of its end.

Launchers call `play_job`. Hydra's own, joblib's and Ray's give several jobs to one process, so that
one that is killed would take others along: there a job is `python -m esper_soa.lab.sweep.jobs`, and
what is left in the launcher's waits for it, hands signals on and notes how it ended. Of submitit
every job has a process to itself, where it plays, as that is where submitit's handlers requeue it.
Whichever it is, a job that fails returns None. Needs no torch.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import BinaryIO, NamedTuple, TypeAlias, cast

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf

from esper_soa.config.errors import OutOfRoomError, PrunedError, RankLostError, UserError, joined
from esper_soa.lab.sweep.plugins import plays_in_own_process
from esper_soa.runtime.console import standing_streams
from esper_soa.runtime.files import IncompleteError, write_text
from esper_soa.runtime.signals import (
    SAVING,
    STOPPING,
    Interrupted,
    importing,
    reacting,
    stopped_at_once,
)
from esper_soa.training.session import quiet_warnings

FOLDER = ".jobs"  # of records, in the folder of the sweep
BEGUN = "begun"
DONE = "done"
PRUNED = "pruned"
FAILED = "failed"
STOPPED = "stopped"
KILLED = "killed"
ENDED = (DONE, PRUNED)  # a sweep that goes on leaves such jobs alone
WAITING = "not begun"  # of a job without a record

Play: TypeAlias = Callable[[DictConfig], float | None]


@dataclass(frozen=True)
class JobRecord:
    """A job of a sweep, as it stands."""

    number: int  # from 0, as Hydra counts
    overrides: list[str]  # of its settings, as on the command line
    folder: str  # of its run
    status: str = BEGUN
    value: float | None = None  # final accuracy in percent; of a pruned job that of its last round
    message: str = ""  # why it did not come to its end

    def ended(self, status: str, value: float | None = None, message: str = "") -> "JobRecord":
        """The record with what the job came to."""
        return replace(self, status=status, value=value, message=message)


class Work(NamedTuple):
    """What the jobs of a command do; functions of modules, so that other processes get them."""

    # The record of a job that has nothing left to do, given what an earlier call noted; None for
    # one to be played.
    settled: Callable[[DictConfig, JobRecord | None], JobRecord | None]
    play: Play


def this_job() -> JobRecord:
    """The job that Hydra has begun in this process."""
    context = HydraConfig.get()
    return JobRecord(int(context.job.num), list(context.overrides.task), context.runtime.output_dir)


def keep(sweep: Path, record: JobRecord) -> None:
    """Write the record of a job, all or nothing; raises OSError."""
    (sweep / FOLDER).mkdir(parents=True, exist_ok=True)
    write_text(sweep / FOLDER / f"{record.number}.json", json.dumps(asdict(record)) + "\n")


def read_records(sweep: Path, number: int | str = "*") -> dict[int, JobRecord]:
    """All records of a sweep by number, in order; or that of the job `number`, if there is one."""
    texts = [path.read_text(encoding="utf-8") for path in (sweep / FOLDER).glob(f"{number}.json")]
    records = [JobRecord(**json.loads(text)) for text in texts]
    return {one.number: one for one in sorted(records, key=lambda one: one.number)}


def play_job(work: Work, composed: DictConfig) -> float | None:
    """Do the job that Hydra has begun here; what sweepers maximise, None where it did not end."""
    sweep = Path(HydraConfig.get().sweep.dir)
    job = this_job()
    try:
        settled = work.settled(composed, read_records(sweep, job.number).get(job.number))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        settled = job.ended(FAILED, message=joined(error))
    keep(sweep, settled or job)
    if settled is not None:
        return settled.value
    if plays_in_own_process(HydraConfig.get()):
        return play_here(work.play, composed)
    return watch(work.play, composed, sweep, job)


def play_here(play: Play, composed: DictConfig) -> float | None:
    """Play the job in this process and keep its record; raises what is no message of ours."""
    job = this_job()
    ended = job
    try:
        with quiet_warnings():
            ended = job.ended(DONE, play(composed))
    except PrunedError as error:
        print(f"job {job.number} is {error}")
        ended = job.ended(PRUNED, error.accuracy, str(error))
    except (UserError, IncompleteError, OutOfRoomError, RankLostError) as error:
        print(f"error: {error}", file=sys.stderr)
        ended = job.ended(FAILED, message=joined(error))
    finally:
        cause = sys.exception()
        if ended is job and isinstance(cause, SystemExit):
            told = joined(cause) if isinstance(cause, Interrupted) else "stopped by the launcher"
            ended = job.ended(STOPPED, message=told)
        elif ended is job:
            ended = job.ended(FAILED, message=f"{type(cause).__name__}: {joined(cause)}")
        keep(Path(HydraConfig.get().sweep.dir), ended)
    return ended.value


def watch(play: Play, composed: DictConfig, sweep: Path, job: JobRecord) -> float | None:
    """Play the job in a process of its own; raises Interrupted where asked to stop meanwhile.

    That process has a session of its own: Ctrl-C reaches it once, from here. The end of its
    standard input tells it that nobody waits for it any more. (Not by multiprocessing, which cannot
    start processes within joblib's.)
    """
    requests: list[int] = []
    context = OmegaConf.to_container(HydraConfig.get(), resolve=False)
    with subprocess.Popen(
        [sys.executable, "-m", "esper_soa.lab.sweep.jobs"],
        stdin=subprocess.PIPE,
        cwd=HydraConfig.get().runtime.cwd,
        start_new_session=True,
    ) as process:

        def hand_on(number: int) -> None:
            requests.append(number)
            process.send_signal(number)

        with reacting(hand_on, (*STOPPING, SAVING)):
            with suppress(BrokenPipeError):  # of one that ended at once; its status says how
                pickle.dump((play, composed, context), cast(BinaryIO, process.stdin))
                cast(BinaryIO, process.stdin).flush()
            status = process.wait()
    record = read_records(sweep, job.number).get(job.number, job)
    if record.status == BEGUN:  # it had no time to say how it ended
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        record = job.ended(KILLED, message=f"its process was ended {how}")
        keep(sweep, record)
        print(f"error: job {job.number}: {record.message}", file=sys.stderr)
    stopping = [number for number in requests if number in STOPPING]
    if stopping:
        raise Interrupted(stopping[-1])
    return record.value


def _stop_with_parent() -> None:
    """Ask this process to stop when its standard input ends, as it does with the holder's end."""
    while os.read(0, 1):  # not by sys.stdin, whose lock a thread must not hold as Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Play the job that standard input holds."""
    with standing_streams(), stopped_at_once():
        with importing():
            play, composed, context = pickle.load(sys.stdin.buffer)
        setup_globals()
        HydraConfig.instance().cfg = cast(HydraConf, OmegaConf.create({"hydra": context}))
        Thread(target=_stop_with_parent, daemon=True).start()
        play_here(play, composed)


if __name__ == "__main__":
    main()
