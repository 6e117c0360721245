"""A loop over envs shared out over processes that stay alive between timings and wait for commands.

Process p of P has the envs p, p + P, ...; where there are several, each has one thread and, on
Linux, a core of its own. A command goes to all of them at once over pipes, and its time is the wall
time until the last has answered. A process whose parent is gone ends by itself: its pipe is closed.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch

from benchmarks.eps_config import EpsConfig, cores
from benchmarks.loops import Loop
from benchmarks.machine import MIB, PeakMemory, count_syncs, resident
from benchmarks.timing import BenchmarkError
from esper_soa.errors import UserError

CONTEXT = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork

MakeLoop = Callable[[EpsConfig, Sequence[int]], Loop]
Answer = Callable[..., object]


class Member(NamedTuple):
    """One process, and this end of its pipe."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection


class Crowd:
    """Processes that hold a loop each."""

    def __init__(self, make: MakeLoop, cfg: EpsConfig, processes: int) -> None:
        """Starts the processes and waits until all loops are built; else BenchmarkError."""
        self.members: list[Member] = []
        own = own_cores(processes)
        try:
            for number, core in enumerate(own):
                here, there = CONTEXT.Pipe()
                arguments = (there, make, cfg, range(number, cfg.envs, processes), core)
                process = CONTEXT.Process(target=serve, args=arguments, daemon=True)
                process.start()
                there.close()
                self.members.append(Member(process, here))
            self._answers()
        except BenchmarkError:
            self.close()
            raise
        self.pinned = own[0] is not None

    def ask(self, command: str, *arguments: object) -> list:
        """Every process's answer; BenchmarkError, and the end of all, where one cannot."""
        for member in self.members:
            with suppress(OSError):  # where it has ended, which `_answers` finds out
                member.pipe.send((command, arguments))
        try:
            return self._answers()
        except BenchmarkError:
            self.close()
            raise

    def timed(self, command: str, *arguments: object) -> tuple[float, list]:
        """Seconds until the last has answered, and the answers."""
        begun = time.perf_counter()
        answers = self.ask(command, *arguments)
        return time.perf_counter() - begun, answers

    def close(self) -> None:
        """End every process; they hold nothing that would have to be saved."""
        for member in self.members:
            member.pipe.close()
            member.process.kill()
        for member in self.members:
            member.process.join()
        self.members = []

    def _answers(self) -> list:
        """One answer of each, in order; BenchmarkError for the first that refuses or has ended."""
        waiting = {member.pipe: number for number, member in enumerate(self.members)}
        found: dict[int, object] = {}
        while waiting:
            for pipe in wait(list(waiting)):
                assert isinstance(pipe, Connection)
                number = waiting.pop(pipe)
                found[number] = self._answer(number)
        return [found[number] for number in range(len(self.members))]

    def _answer(self, number: int) -> object:
        process, pipe = self.members[number]
        name = f"process {number + 1} of {len(self.members)} of the loop"
        try:
            good, answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join()
            raise BenchmarkError(
                f"{name} has ended with status {process.exitcode}; its message stands above"
            ) from None
        if not good:
            raise BenchmarkError(f"{name}: {answer}")
        return answer


def own_cores(processes: int) -> list[int | None]:
    """A core for each of several processes; None where one may take all, or nobody can tell."""
    if processes == 1 or not hasattr(os, "sched_getaffinity") or processes > cores():
        return [None] * processes
    return list(sorted(os.sched_getaffinity(0))[:processes])


def serve(
    pipe: Connection, make: MakeLoop, cfg: EpsConfig, numbers: Sequence[int], core: int | None
) -> None:
    """The life of one process: builds the loop over these envs, answers until the pipe closes."""
    # Ctrl-C reaches the parent too, which closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    # the engine's on a GPU; on a CPU it says nothing
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True
    try:
        before = resident()
        loop = make(cfg, numbers)
        pipe.send((True, None))
        answer_all(pipe, loop, before)
    except UserError as error:
        pipe.send((False, str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or wants nothing more


def answer_all(pipe: Connection, loop: Loop, before: int) -> None:
    """Answer one command after the other; raises EOFError when the pipe is closed."""
    answers: dict[str, Answer] = {
        "choose": loop.choose,
        "trial": loop.trial,
        "play": loop.play,
        "facts": loop.facts,
        "results": loop.results,
        "threads": torch.set_num_threads,
        "processor_seconds": time.process_time,
        "syncs": lambda: count_syncs(loop.one_step, loop.device),
        "peak_mib": lambda: peak_mib(loop, before),
    }
    while True:
        command, arguments = pipe.recv()
        pipe.send((True, answers[command](*arguments)))


def peak_mib(loop: Loop, before: int) -> float:
    """Most memory during an env-step, above the `before` bytes of before the loop was built."""
    with PeakMemory(loop.device) as memory:
        loop.one_step()
    standing = memory.before - (before if loop.device.type == "cpu" else 0)
    return memory.mib + standing / MIB
