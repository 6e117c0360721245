"""Work in processes of its own: commands of the package, and jobs side by side that do not bring
each other down.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TypeVar

from esper_soa.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
LOOK = 0.5  # seconds between two looks at what the jobs have done
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

Job = TypeVar("Job")
Result = TypeVar("Result")


def command(module: str, *settings: str, threads: int | None = 1) -> None:
    """Run one of the package's commands on `threads` threads (None: as it finds them), its console
    kept back.

    Raises CalledProcessError where it fails, after its words on stderr.
    """
    env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    subprocess.run(
        [sys.executable, "-m", module, *settings],
        check=True,
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
    )


def in_processes(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    at_once: int,
    look: Callable[[], None] = lambda: None,
) -> list[Result | Exception]:
    """work(job) for every job, `at_once` at a time, each in a fresh process of one thread; results
    or what was raised.

    A process that dies takes no other job along: its job has a BrokenProcessPool. After a
    UserError, which all of them
    would meet, no more are begun: those have a UserError that says so. `look` is called from time
    to time and at the end. Where it raises, or Ctrl-C does, all processes are ended; so they are
    where this one dies.
    """
    with ThreadPoolExecutor(at_once) as threads, _environment(ONE_THREAD):
        waiting = [threads.submit(_alone, work, job) for job in jobs]
        try:
            left: set[Future[Result]] = set(waiting)
            while left:
                done, left = wait(left, timeout=LOOK)
                if any(isinstance(_raised(one), UserError) for one in done):
                    for one in left:
                        one.cancel()
                look()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise
    return [_raised(one) or one.result() for one in waiting]


def _raised(job: Future[Result]) -> Exception | None:
    if job.cancelled():
        return UserError("not begun, as another could not be played")
    error = job.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _alone(work: Callable[[Job], Result], job: Job) -> Result:
    """work(job) in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin) as pool:
        return pool.submit(work, job).result()


def _begin() -> None:
    """In a new process: die with the one that began it, and at once by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_any([parent.sentinel])
        os._exit(1)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes begun in the context."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def why(error: Exception) -> str:
    """What ended a job, in one line."""
    if isinstance(error, BrokenProcessPool):
        return "its process died; was it killed, or out of memory?"
    words = " ".join(str(error).split())
    return words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"
