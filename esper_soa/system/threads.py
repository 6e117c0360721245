"""Runs pieces of work side by side on threads of the CPU, each with one thread per operation.

Operations release Python's lock while they compute, so pieces on different threads use different
cores; unlike the threads inside an operation, they wait for each other only at the end. What is
local to a thread (gradient mode, modes that watch operations) starts afresh there.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

Result = TypeVar("Result")


class PieceCancelled(Exception):  # noqa: N818 (what happened, not a fault)
    """Raised in a piece whose caller no longer waits for its result."""


class Call(threading.Event):
    """One call of `run_pieces`, as its pieces see it; set once nobody waits any more."""

    def check(self) -> None:
        """Raise PieceCancelled if the call was cancelled; pieces check between batches."""
        if self.is_set():
            raise PieceCancelled


def chunks(num_envs: int, size: int) -> list[np.ndarray]:
    """Env numbers of as few chunks as hold at most `size` each, equal or smaller by one."""
    return np.array_split(np.arange(num_envs), -(-num_envs // size))


Piece = Callable[[Call], Result]


def run_pieces(pieces: Sequence[Piece[Result]], workers: int) -> list[Result]:
    """Results in the order of `pieces`; the calling thread does them where one worker or piece is.

    The first piece that fails ends the call: the others are given up, and once none runs any more,
    its exception is raised with its traceback. So does an interrupt of the calling thread.
    """
    call = Call()
    if workers == 1 or len(pieces) == 1:
        return [piece(call) for piece in pieces]
    futures = [_pool(workers).submit(piece, call) for piece in pieces]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:  # nothing of this is left to do where all went well
        call.set()
        for future in futures:
            future.cancel()
        wait(futures)


@lru_cache(maxsize=8)  # two worlds of one process may take turns with different numbers of workers
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay; each gives an operation one thread, whatever its caller gives it."""
    return ThreadPoolExecutor(workers, "envs", initializer=_take_one_thread)


# A child has no threads but the one that forked: what is sent to the pools of its parent would wait
# for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _take_one_thread() -> None:
    """Once and for all: reading the number makes it this thread's own, else its first operation
    takes what was set last in the process.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
