"""Work in other processes: runs of the package, and jobs side by side."""

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


def train(*settings: str) -> None:
    """Play a run of the package with all cores, its console kept back; else BenchmarkError."""
    words = [sys.executable, "-m", "esper_soa.train", *settings]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(words[2:])} ended with status {done.returncode}")


def fresh_processes(count: int = 1) -> ProcessPoolExecutor:
    """Fresh processes, in which torch may have threads; they end with this one, and by Ctrl-C."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin)


def in_processes(
    work: Callable[[Job], object], jobs: Mapping[str, Job], at_once: int, look: Callable[[], None]
) -> None:
    """work(job), `at_once` at a time; the first that fails ends it by a BenchmarkError."""
    with fresh_processes(at_once) as pool:
        begun = {pool.submit(work, job): name for name, job in jobs.items()}
        left = set(begun)
        while left:
            done, left = wait(left, LOOK, FIRST_EXCEPTION)
            look()
            # where a process died, all jobs that had not ended are failed ones: it had the earliest
            for future in (future for future in begun if future in done):
                try:
                    future.result()
                except (BrokenProcessPool, BenchmarkError) as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    died = isinstance(error, BrokenProcessPool)
                    why = "its process died; was it killed, or out of memory?" if died else error
                    raise BenchmarkError(
                        f"{begun[future]}: {why} What was done stays: begin again to go on"
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
