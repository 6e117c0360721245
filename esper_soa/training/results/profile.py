"""Where the time of a run goes: the share of every phase per update, or a trace of a few env-steps.

The caller reports the end of each phase: on CUDA an event in the stream, read once a round.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig

from esper_soa.env.env import NO_OBSERVER, Observer
from esper_soa.env.step import StepData
from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.training.results.progress import LOGGER

PROFILE_PHASES = ["training", "validation", "data", "state", "policy", "update", "telemetry"]
PROFILE_PHASES += ["reset", "files"]
SKIPPED_STEPS = 3  # env-steps before a trace, and in it
TRACED_STEPS = 3


class PhaseProfile(Observer):
    """Seconds by phase since the last `take`.

    On a CPU feeds are timed apart from the training and validation around them; on CUDA, where they
    may be part of a captured graph, they are not, and "data" is what goes before.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self.cuda = device.type == "cuda"
        self.clock = clock
        self._restart()

    def _restart(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.fed = defaultdict[int, float](float)  # seconds of feeds in this phase, by thread
        self.begin = self.clock()
        self.phases = list[str]()  # on CUDA, and the events at their ends, after the first
        self.events = [_event()] if self.cuda else []

    def on_phase_end(self, phase: str) -> None:
        """Feeds in several threads run side by side: their mean is taken out of the phase."""
        if self.cuda:
            self.phases.append(phase)
            self.events.append(_event())
            return
        now = self.clock()
        inner = sum(self.fed.values()) / max(1, len(self.fed))
        self.seconds[phase] += now - self.begin - inner
        if inner:
            self.seconds["data"] += inner
        self.fed.clear()
        self.begin = now

    def watch(self, data: StepData) -> StepData:
        """The same data; on a CPU both feeds report to this profile."""
        if self.cuda:
            return data
        training = cast(TrainingFeed, TimedFeed(data.training, self))
        validation = cast(ValidationFeed, TimedFeed(data.validation, self))
        return data._replace(training=training, validation=validation)

    def take(self) -> dict[str, float]:
        """Seconds by phase; counting begins anew."""
        if self.cuda:
            self.events[-1].synchronize()
            for phase, begin, end in zip(self.phases, self.events, self.events[1:], strict=False):
                self.seconds[phase] += begin.elapsed_time(end) / 1e3
        seconds = dict(self.seconds)
        self._restart()
        return seconds

    def report(self, label: str) -> None:
        """One line: the share of every phase since the last report."""
        seconds = self.take()
        LOGGER.info("phases   %s: %s of %.1f s", label, shares(seconds), sum(seconds.values()))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimedFeed:
    """A feed whose calls are timed; an engine's own cutting is training."""

    def __init__(self, feed: TrainingFeed | ValidationFeed, profile: PhaseProfile) -> None:
        self._feed = feed
        self._profile = profile

    def __getattr__(self, name: str) -> object:
        method = getattr(self._feed, name)
        if not callable(method):
            return method

        def timed(*args: object) -> object:
            begin = self._profile.clock()
            result = method(*args)
            self._profile.fed[threading.get_ident()] += self._profile.clock() - begin
            return result

        return timed


class TraceProfile(Observer):
    """Writes a trace of a few env-steps after warm-up, once, to a file that trace viewers read."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.path = path
        self.written = False
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=torch.profiler.schedule(
                skip_first=SKIPPED_STEPS - 1, wait=0, warmup=1, active=TRACED_STEPS, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=True,
            # chunks of envs may run in several threads; torch (2.11 to 2.13) has no other name
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self.profiler.start()

    def env_step(self) -> None:
        """Count the env-step; the trace begins and ends by this count."""
        if not self.written:
            self.profiler.step()
            if self.written:
                self.profiler.stop()

    def close(self) -> None:
        """Stop where the run was too short for a trace."""
        if not self.written:
            self.profiler.stop()
        if not self.written:
            needed = SKIPPED_STEPS + TRACED_STEPS + 1
            LOGGER.warning("profile  no trace: it needs %d env-steps in a run", needed)

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.written = True
        LOGGER.info("profile  trace of %d env-steps: %s", TRACED_STEPS, self.path)


def shares(seconds: dict[str, float]) -> str:
    """`training 71.2 %, ...` in the order of PROFILE_PHASES, without those that took no time."""
    total = sum(seconds.values()) or 1.0
    names = [phase for phase in PROFILE_PHASES if phase in seconds]
    names += [phase for phase in seconds if phase not in PROFILE_PHASES]
    return ", ".join(f"{phase} {100 * seconds[phase] / total:.1f} %" for phase in names)


def make_profile(mode: str, device: torch.device, folder: Path) -> Observer:
    """The profile that `profile` (off, phases, torch) asks for; a trace goes to trace.json."""
    if mode == "phases":
        return PhaseProfile(device)
    return TraceProfile(device, folder / "trace.json") if mode == "torch" else NO_OBSERVER
