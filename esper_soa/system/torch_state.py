"""The state of torch and numpy in which the package computes, and the caller's.

A program may have another default dtype or device, no gradients, autocast, or errors of numpy that
raise. Every public function that computes does so in `package_state`, and a generator leaves it
where it waits. Threads, which settings have, are elsewhere (runtime/device.py), but in a process
that was forked from one with torch.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from esper_soa.system.cores import FORKED_WITH_TORCH

CPU = torch.device("cpu")
SMALLEST_NORMAL = sys.float_info.min


class ThreadState(NamedTuple):
    """The switches that every thread has for itself, as a new thread finds them."""

    gradients: bool = True
    autocast_on_cpu: bool = False
    autocast_on_gpu: bool = False
    flush_denormals: bool = False

    def set(self) -> None:
        """Have this thread be in this state."""
        torch.set_grad_enabled(self.gradients)
        torch.set_autocast_enabled("cpu", self.autocast_on_cpu)
        torch.set_autocast_enabled("cuda", self.autocast_on_gpu)
        torch.set_flush_denormal(self.flush_denormals)


class ProcessState(NamedTuple):
    """The switches of a process: other threads of the caller see the package's meanwhile.

    Anomaly mode would end a run at the first host that diverges. Deterministic algorithms stay as
    they are; where there is none, torch warns.
    """

    dtype: torch.dtype = torch.float32
    anomaly: bool = False
    raises: bool = False  # where there is no deterministic algorithm, and such are asked for

    def set(self) -> None:
        """Have the process be in this state."""
        torch.set_default_dtype(self.dtype)
        torch.set_anomaly_enabled(self.anomaly, torch.is_anomaly_check_nan_enabled())
        deterministic = torch.are_deterministic_algorithms_enabled()
        warns = deterministic and not self.raises
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


PACKAGE_THREAD = ThreadState()
PACKAGE_PROCESS = ProcessState()


def thread_state() -> ThreadState:
    return ThreadState(
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        autocast_on_gpu=torch.is_autocast_enabled("cuda"),
        flush_denormals=SMALLEST_NORMAL / 4 == 0,
    )


def process_state() -> ProcessState:
    deterministic = torch.are_deterministic_algorithms_enabled()
    raises = deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
    return ProcessState(torch.get_default_dtype(), torch.is_anomaly_enabled(), raises)


class SharedState:
    """The state of the process, which is the package's while a thread needs it, then the caller's
    again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = 0
        self._caller = PACKAGE_PROCESS

    def __enter__(self) -> None:
        with self._lock:
            before = process_state()
            if self._uses == 0:
                self._caller = before
            self._uses += 1
            if before != PACKAGE_PROCESS:
                PACKAGE_PROCESS.set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._uses -= 1
            after = PACKAGE_PROCESS if self._uses else self._caller
            if process_state() != after:
                after.set()


SHARED = SharedState()


@contextmanager
def package_state() -> Iterator[None]:
    """The package's state in the context; the caller's is in force again behind it."""
    tensor = torch.empty(0)  # made as the caller's program makes tensors
    errors = np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")
    with errors, SHARED, ExitStack() as stack:
        if tensor.is_inference():
            stack.enter_context(torch.inference_mode(False))
        if tensor.device != CPU:
            stack.enter_context(CPU)
        if FORKED_WITH_TORCH.is_set() and torch.get_num_threads() > 1:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # it lacks the others, which operations would wait for
        before = thread_state()
        if before != PACKAGE_THREAD:
            PACKAGE_THREAD.set()
        try:
            yield
        finally:
            if thread_state() != before:
                before.set()
