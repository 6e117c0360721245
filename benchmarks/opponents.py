"""The opponents in a benchmark: a loop on as many cores as the engine has, laid out in the way that
was quickest.

In its warm-up every layout is tried, one process of 1, 2, 4 ... threads and one process of one
thread per core, and within it every form of the loop; what was tried and chosen is part of the
record. Process p of P has the envs p, p + P, ...; where there are several, each has, on Linux, a
core of its own.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from benchmarks.eps_config import EpsConfig
from benchmarks.loops import BareLoop, Loop, PlainLoop, tune
from benchmarks.processes import fresh_processes
from benchmarks.timing import COLUMNS, BenchmarkError, Timing, in_columns
from esper_soa.runtime.device import resolve_device
from esper_soa.system.cores import core_numbers, usable_cores
from esper_soa.system.errors import UserError

LAYOUT_TRIALS = 3  # env-steps of all envs per layout, of which the quickest counts
LOOPS: dict[str, type[PlainLoop] | type[BareLoop]] = {"baseline": PlainLoop, "bare": BareLoop}
HERE: dict[str, Loop] = {}  # the loop of this process, in one of a crowd


def build(name: str, cfg: EpsConfig, numbers: Sequence[int], core: int | None) -> None:
    """In a new process: the loop over these envs, on that core."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    # the engine's on a GPU; on a CPU it says nothing
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True
    try:
        HERE["loop"] = LOOPS[name](cfg, numbers)
    except UserError as error:
        raise BenchmarkError(str(error)) from None  # which can be told to the parent


def call(command: str, *arguments: int | str) -> object:
    """In a process of a crowd: a method of its loop, or threads."""
    if command == "threads":
        torch.set_num_threads(int(arguments[0]))
        return None
    return getattr(HERE["loop"], command)(*arguments)


class Crowd:
    """Processes that hold a loop each, and do what they are asked all at once."""

    def __init__(self, name: str, cfg: EpsConfig, processes: int) -> None:
        """Starts the processes and waits until all loops are built."""
        cores = cores_of(processes)
        self.pinned = cores[0] is not None
        self.members = [fresh_processes() for _ in cores]
        waiting = [
            member.submit(build, name, cfg, range(number, cfg.envs, processes), core)
            for number, (member, core) in enumerate(zip(self.members, cores, strict=True))
        ]
        for future in waiting:
            future.result()

    def ask(self, command: str, *arguments: int | str) -> list:
        """Every process's answer; BenchmarkError where one has ended."""
        waiting = [member.submit(call, command, *arguments) for member in self.members]
        try:
            return [future.result() for future in waiting]
        except BrokenProcessPool as error:
            raise BenchmarkError("a process of the loop has ended; was it killed?") from error

    def close(self) -> None:
        """End every process."""
        for member in self.members:
            member.shutdown()


def cores_of(processes: int) -> list[int | None]:
    """A core for each of several processes; None where one may take all, or nobody can tell."""
    if processes == 1 or not hasattr(os, "sched_getaffinity") or processes > usable_cores():
        return [None] * processes
    return list(core_numbers()[:processes])


class Layout(NamedTuple):
    """How a loop is laid out on the cores."""

    processes: int
    threads: int  # of each


def layouts(cfg: EpsConfig, device: torch.device) -> list[Layout]:
    """The layouts that are tried; a GPU is fed by one process."""
    if device.type != "cpu":
        return [Layout(1, 1)]
    cores = usable_cores()
    threads = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    many = min(cores, cfg.envs)
    return [*(Layout(1, count) for count in (*threads, cores)), *[Layout(many, 1)] * (many > 1)]


class LoopSide:
    """A loop in the quickest of its layouts and forms; it has neither policy nor update."""

    crowd: Crowd

    def __init__(self, name: str, cfg: EpsConfig) -> None:
        """Nothing is started yet; `warm_up` must come before the first timing."""
        self.name = name
        self.cfg = cfg
        self.tried: dict[str, float] = {}
        self.images = (0, 0)

    def warm_up(self) -> None:
        """Choose a layout and a form, then play the first env-steps."""
        options = layouts(self.cfg, resolve_device(self.cfg.device))
        seconds = {layout: self._try(layout) for layout in options}
        self.layout = min(seconds, key=lambda layout: seconds[layout])
        if self.layout != options[-1]:
            self._try(self.layout)
        self.crowd.ask("play", self.cfg.warmup)

    def run(self) -> Timing:
        """A few env-steps of all envs; phases are those of the process that took longest."""
        steps = self.cfg.timed_steps
        begun = time.perf_counter()
        played = self.crowd.ask("play", steps)
        seconds = time.perf_counter() - begun
        self.images = sum(part.done.train for part in played), sum(part.done.val for part in played)
        self.check()
        slowest = max(played, key=lambda part: part.seconds)
        phases = {phase: spent / steps for phase, spent in slowest.phases.items()}
        columns = COLUMNS[: LOOPS[self.name].columns]
        return Timing(in_columns(phases, seconds / steps, columns), phases)

    def check(self) -> None:
        """Raise BenchmarkError unless the declared images were worked on."""
        if self.images != self.cfg.images:
            raise BenchmarkError(
                f"{self.name}: {self.images} training and validation images, not {self.cfg.images}"
            )

    def facts(self) -> dict[str, object]:
        """What was chosen in the warm-up, and from what."""
        return self.crowd.ask("facts")[0] | {
            "processes": self.layout.processes,
            "threads": self.layout.threads,
            "pinned": self.crowd.pinned,
            "tried_ms": self.tried,
            "train_images": self.images[0],
            "val_images": self.images[1],
            "rows": self.cfg.rows,
            "peak_mib": sum(self.crowd.ask("peak_mib")),
        }

    def step_times(self, number: int) -> list[float]:
        """Seconds of so many env-steps of all envs, each by itself."""
        times = []
        for _ in range(number):
            begun = time.perf_counter()
            self.crowd.ask("play", 1)
            times.append(time.perf_counter() - begun)
        return times

    def syncs(self) -> int:
        """Waits for the device in an env-step of all envs."""
        return sum(self.crowd.ask("syncs"))

    def processor_seconds(self) -> float:
        """Processor time of its processes so far."""
        return sum(self.crowd.ask("processor_seconds"))

    def close(self) -> None:
        """End its processes."""
        if "crowd" in vars(self):
            self.crowd.close()

    def _try(self, layout: Layout) -> float:
        """Seconds of an env-step of all envs in this layout, in its quickest forms."""
        if "crowd" not in vars(self) or len(self.crowd.members) != layout.processes:
            self.close()
            self.crowd = Crowd(self.name, self.cfg, layout.processes)
        self.crowd.ask("threads", layout.threads)
        words = f"{layout.processes} of {layout.threads} threads"
        found = tune(
            self.crowd.ask("forms")[0],
            lambda *form: self.crowd.ask("choose", *form),
            lambda: max(self.crowd.ask("trial")),
        )
        self.tried |= {f"{words}, {form}": milliseconds for form, milliseconds in found.items()}
        times = self.step_times(LAYOUT_TRIALS)
        self.tried[f"{words}, all envs"] = 1e3 * min(times)
        return min(times)
