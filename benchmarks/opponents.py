"""The opponents in a benchmark: a loop on as many cores as the engine has, laid out in the way that
was quickest.

In its warm-up every layout is tried, one process of 1, 2, 4 ... threads and one process of one
thread per core, and within it every form of the loop; what was tried and chosen is part of the
record.
"""

from typing import NamedTuple

import torch

from benchmarks.crowd import Crowd
from benchmarks.eps_config import EpsConfig, cores, doublings
from benchmarks.loops import BareLoop, PlainLoop, Played, tune
from benchmarks.timing import COLUMNS, BenchmarkError, Timing, in_columns
from esper_soa.ops.device import resolve_device

LAYOUT_TRIALS = 3  # env-steps of all envs per layout, of which the quickest counts
LOOPS: dict[str, type[PlainLoop] | type[BareLoop]] = {"baseline": PlainLoop, "bare": BareLoop}

Choices = dict[str, int | str]


class Layout(NamedTuple):
    """How a loop is laid out on the cores."""

    processes: int
    threads: int  # of each

    def __str__(self) -> str:
        return f"{_some(self.processes, 'process', 'es')} of {_some(self.threads, 'thread', 's')}"


class Tried(NamedTuple):
    """A layout in its quickest form."""

    seconds: float  # of an env-step of all envs
    layout: Layout
    chosen: Choices  # forms, by setting


def layouts(cfg: EpsConfig, device: torch.device) -> list[Layout]:
    """The layouts that are tried; a GPU is fed by one process."""
    if device.type != "cpu":
        return [Layout(1, cfg.baseline_threads or 1)]
    if cfg.baseline_processes > 1:
        return [Layout(cfg.baseline_processes, cfg.baseline_threads or 1)]
    if cfg.baseline_threads:
        return [Layout(1, cfg.baseline_threads)]
    found = [Layout(1, int(threads)) for threads in doublings(cores())]
    many = min(cores(), cfg.envs)
    return found + [Layout(many, 1)] * (many > 1 and cfg.baseline_processes == 0)


class LoopSide:
    """A loop in the quickest of its layouts and forms; it has neither policy nor update."""

    def __init__(self, name: str, cfg: EpsConfig) -> None:
        """Nothing is started yet; `warm_up` must come before the first timing."""
        self.name = name
        self.cfg = cfg
        self.device = resolve_device(cfg.device)
        self.loop = LOOPS[name]
        self.tried: dict[str, float] = {}
        self.images = (0, 0)
        self.crowd: Crowd | None = None

    def warm_up(self) -> None:
        """Choose a layout and a form, then play the first env-steps."""
        options = layouts(self.cfg, self.device)
        results = [self._try(layout, len(options) > 1) for layout in options]
        best = min(results, key=lambda result: result.seconds)
        self.layout = best.layout
        crowd = self._crowd_of(best.layout)
        for setting, value in best.chosen.items():
            crowd.ask("choose", setting, value)
        crowd.ask("play", self.cfg.warmup)

    def run(self) -> Timing:
        """A few env-steps of all envs. The columns are those of the process that took longest, up
        to the wall time.
        """
        steps = self.cfg.timed_steps
        crowd = self._crowd()
        seconds, answers = crowd.timed("play", steps)
        played = [Played(*answer) for answer in answers]
        self.images = sum(one.done.train for one in played), sum(one.done.val for one in played)
        self.check()
        slowest = max(played, key=lambda one: one.seconds)
        phases = {phase: spent / steps for phase, spent in slowest.phases.items()}
        return Timing(in_columns(phases, seconds / steps, COLUMNS[: self.loop.columns]), phases)

    def check(self) -> None:
        """Raise BenchmarkError unless the declared images were worked on."""
        if self.images != self.cfg.images:
            raise BenchmarkError(
                f"{self.name}: {self.images} training and validation images, not {self.cfg.images}"
            )

    def facts(self) -> dict[str, object]:
        """What was chosen in the warm-up, and from what."""
        crowd = self._crowd()
        of_each = crowd.ask("facts")
        return of_each[0] | {
            "processes": self.layout.processes,
            "threads": self.layout.threads,
            "pinned": crowd.pinned,
            "tried_ms": self.tried,
            "train_images": self.images[0],
            "val_images": self.images[1],
            "rows": self.cfg.rows,
            "peak_mib": sum(crowd.ask("peak_mib")),
            "graphs": sum(each["graphs"] for each in of_each),
        }

    def syncs(self) -> int:
        """Waits for the device in an env-step of all envs."""
        return sum(self._crowd().ask("syncs"))

    def processor_seconds(self) -> float:
        """Processor time of its processes so far."""
        return sum(self._crowd().ask("processor_seconds"))

    def close(self) -> None:
        """End its processes."""
        if self.crowd is not None:
            self.crowd.close()
            self.crowd = None

    def _crowd(self) -> Crowd:
        if self.crowd is None:
            raise BenchmarkError(f"{self.name}: its processes have not been started")
        return self.crowd

    def _crowd_of(self, layout: Layout) -> Crowd:
        """The running processes if they are as many, else new ones in their place."""
        if self.crowd is None or len(self.crowd.members) != layout.processes:
            self.close()
            self.crowd = Crowd(self.loop, self.cfg, layout.processes)
        self.crowd.ask("threads", layout.threads)
        return self.crowd

    def _try(self, layout: Layout, several: bool) -> Tried:
        """The quickest forms of the loop in this layout, and what an env-step takes in them."""
        crowd = self._crowd_of(layout)
        chosen = Choices()

        def choose(setting: str, value: int | str) -> None:
            chosen[setting] = value
            crowd.ask("choose", setting, value)

        found = tune(
            self.loop.forms(self.cfg, self.device), choose, lambda: max(crowd.ask("trial"))
        )
        self.tried |= {f"{layout}, {form}": milliseconds for form, milliseconds in found.items()}
        if not several:
            return Tried(0.0, layout, chosen)
        seconds = min(crowd.timed("play", 1)[0] for _ in range(LAYOUT_TRIALS))
        self.tried[f"{layout}, all envs"] = 1e3 * seconds
        return Tried(seconds, layout, chosen)


def _some(count: int, one: str, plural: str) -> str:
    return f"{count} {one}{plural if count != 1 else ''}"
