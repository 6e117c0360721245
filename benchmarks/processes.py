"""Work in processes of its own: commands of the package, and jobs side by side."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import TypeVar

from benchmarks.timing import BenchmarkError

ROOT = Path(__file__).resolve().parent.parent
LOOK = 0.5  # seconds between two looks at what the jobs have done

Job = TypeVar("Job")


def command(module: str, *settings: str, threads: int | None = 1) -> None:
    """Run a command of the package, its console kept back. Raises CalledProcessError."""
    env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    words = [sys.executable, "-m", module, *settings]
    subprocess.run(words, check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)


def own_process(processes: int = 1) -> ProcessPoolExecutor:
    """Fresh processes, in which torch may have threads; they end with this one, and by Ctrl-C."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)


def in_processes(
    work: Callable[[Job], object], jobs: Mapping[str, Job], at_once: int, look: Callable[[], None]
) -> None:
    """work(job), `at_once` at a time; the first that fails ends it by a BenchmarkError."""
    with own_process(at_once) as pool:
        begun = {pool.submit(work, job): name for name, job in jobs.items()}
        left = set(begun)
        while left:
            done, left = wait(left, LOOK, FIRST_EXCEPTION)
            look()
            # where a process died, all jobs that had not ended are failed ones: it had the earliest
            for one in (one for one in begun if one in done):
                try:
                    one.result()
                except (BrokenProcessPool, BenchmarkError) as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    died = isinstance(error, BrokenProcessPool)
                    why = "its process died; was it killed, or out of memory?" if died else error
                    raise BenchmarkError(
                        f"{begun[one]}: {why} What was done stays: begin again to go on"
                    ) from error


def _begin() -> None:
    """In a new process: die with the one that began it, and at once by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_any([parent.sentinel])
        os._exit(1)
