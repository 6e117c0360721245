"""Where the time of a run goes: the share of every phase, one line per update, or a trace of a few
env-steps.

What plays says where a phase ends: what passed since the one before belongs to it. On CUDA that is
an event in the stream; the events are read once a round.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig

from esper_soa.env.step import Work
from esper_soa.nets.engine import TrainingFeed, ValidationFeed
from esper_soa.ops.progress import LOGGER

PHASES = (
    "training",
    "validation",
    "data",
    "state",
    "policy",
    "update",
    "telemetry",
    "reset",
    "files",
)
SKIPPED_STEPS = 3  # env-steps before a trace, and in it
TRACED_STEPS = 3

Moment = float | torch.cuda.Event


class NoProfile:
    """Watches nothing; what the others override."""

    def phase_ended(self, phase: str) -> None:
        """What passed since the phase before was `phase`."""

    def watch(self, work: Work) -> Work:
        """The work of an env-step, whose feeds are timed where that is wanted."""
        return work

    def env_step(self) -> None:
        """An env-step ends here."""

    def report(self, label: str) -> None:
        """An update ends here; say what is known."""

    def close(self) -> None:
        """The run ends here."""


NO_PROFILE = NoProfile()


def every_thread() -> _ExperimentalConfig:
    """For torch.profiler.profile: watch all threads, as chunks of envs may run in several.

    The type is that of its documented argument; torch (2.11 to 2.13) has no other name for it.
    """
    return _ExperimentalConfig(profile_all_threads=True)


class HostClock:
    """Moments on the host, for a CPU, where work is done when a call returns."""

    def now(self) -> float:
        """This moment, in seconds."""
        return time.perf_counter()

    def seconds(self, moments: list[Moment]) -> list[float]:
        """Each moment in seconds after the first."""
        return [float(moment) - float(moments[0]) for moment in moments]  # type: ignore[arg-type]


class DeviceClock:
    """Moments in a CUDA stream: events, read by the host only in `seconds`, then used again."""

    def __init__(self) -> None:
        self.free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        """This place in the stream."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moments: list[Moment]) -> list[float]:
        """Each moment in seconds after the first; waits for the last. The events are then free."""
        events = [moment for moment in moments if isinstance(moment, torch.cuda.Event)]
        events[-1].synchronize()
        found = [events[0].elapsed_time(event) / 1e3 for event in events]
        self.free += events
        return found


class Span(NamedTuple):
    """A feed at work within a phase."""

    phase: int  # number of phases that had ended
    thread: int
    begin: Moment
    end: Moment


class PhaseProfile(NoProfile):
    """Seconds by phase since the last `take`.

    On a CPU feeds are timed apart from the training and validation around them; on CUDA, where they
    may be part of a captured graph, they are not, and "data" is what goes before.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = DeviceClock() if device.type == "cuda" else HostClock()
        self.start: Moment = self.clock.now()
        self.phases: list[tuple[str, Moment]] = []
        self.spans: list[Span] = []

    def phase_ended(self, phase: str) -> None:
        """Two list entries and one reading of the clock."""
        self.phases.append((phase, self.clock.now()))

    def watch(self, work: Work) -> Work:
        """The same work; on a CPU both feeds report to this profile."""
        if isinstance(self.clock, DeviceClock):
            return work
        training = TimedTraining(work.training, self)
        validation = TimedValidation(work.validation, self)
        return work._replace(training=training, validation=validation)

    def span(self, begin: Moment) -> None:
        """A feed was at work from `begin` until now, in whatever thread."""
        self.spans.append(Span(len(self.phases), threading.get_ident(), begin, self.clock.now()))

    def take(self) -> dict[str, float]:
        """Seconds by phase, in the order in which they were first met; counting begins anew.

        Feeds in several threads run side by side: their mean is taken out of the phase around them.
        """
        spans = [span for span in self.spans if span.phase < len(self.phases)]
        moments = [self.start, *(moment for _, moment in self.phases)]
        times = self.clock.seconds(moments + [m for span in spans for m in (span.begin, span.end)])
        fed = times[len(moments) :]
        data = [0.0] * len(self.phases)
        threads = [set[int]() for _ in self.phases]
        for span, begin, end in zip(spans, fed[::2], fed[1::2], strict=True):
            data[span.phase] += end - begin
            threads[span.phase].add(span.thread)
        found: dict[str, float] = {}
        for index, (phase, _) in enumerate(self.phases):
            inside = data[index] / max(1, len(threads[index]))
            found[phase] = found.get(phase, 0.0) + times[index + 1] - times[index] - inside
            if inside:
                found["data"] = found.get("data", 0.0) + inside
        self.start = self.clock.now()
        self.phases = []
        self.spans = []
        return found

    def report(self, label: str) -> None:
        """One line: the share of every phase since the last report."""
        found = self.take()
        total = sum(found.values())
        LOGGER.info("phases   %s: %s of %.1f s", label, shares(found), total)


class TraceProfile(NoProfile):
    """Writes a trace of a few env-steps after warm-up, once, to a file that trace viewers read."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.path = path
        self.state = "waiting"  # then running, then written
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=torch.profiler.schedule(
                skip_first=SKIPPED_STEPS - 1, wait=0, warmup=1, active=TRACED_STEPS, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=True,
            experimental_config=every_thread(),
        )

    def env_step(self) -> None:
        """Count the env-step; the trace begins and ends by this count."""
        if self.state == "written":
            return
        if self.state == "waiting":
            self.profiler.start()
            self.state = "running"
        self.profiler.step()
        if self.state == "written":
            self.profiler.stop()

    def close(self) -> None:
        """Stop where the run was too short for a trace."""
        if self.state == "running":
            self.profiler.stop()
        if self.state != "written":
            needed = SKIPPED_STEPS + TRACED_STEPS + 1
            LOGGER.warning("profile  no trace: it needs %d env-steps in a run", needed)

    def _write(self, profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(self.path))
        self.state = "written"
        LOGGER.info("profile  trace of %d env-steps: %s", TRACED_STEPS, self.path)


Asked = ParamSpec("Asked")
Given = TypeVar("Given")


def _timed(profile: PhaseProfile, feed: Callable[Asked, Given]) -> Callable[Asked, Given]:
    """`feed`, reporting when it was at work."""

    def call(*args: Asked.args, **kwargs: Asked.kwargs) -> Given:
        begin = profile.clock.now()
        found = feed(*args, **kwargs)
        profile.span(begin)
        return found

    return call


class TimedTraining:
    """A training feed whose batches are timed, cut or not; an engine's own cutting is training."""

    def __init__(self, feed: TrainingFeed, profile: PhaseProfile) -> None:
        self.batch = _timed(profile, feed.batch)
        self.crops = _timed(profile, feed.crops)


class TimedValidation:
    """A validation feed whose batches are timed; as TimedTraining."""

    def __init__(self, feed: ValidationFeed, profile: PhaseProfile) -> None:
        self.batches = _timed(profile, feed.batches)
        self.crops = _timed(profile, feed.crops)


def shares(seconds: dict[str, float]) -> str:
    """`training 71.2 %, ...` in the order of PHASES; phases that took no time are left out."""
    total = sum(seconds.values()) or 1.0
    known = sorted(seconds, key=lambda phase: (*PHASES, phase).index(phase))
    return ", ".join(f"{phase} {100 * seconds[phase] / total:.1f} %" for phase in known)


def make_profile(mode: str, device: torch.device, folder: Path) -> NoProfile:
    """What setting `profile` (off, phases, torch) asks for; traces go to `folder`/trace.json."""
    if mode == "phases":
        return PhaseProfile(device)
    return TraceProfile(device, folder / "trace.json") if mode == "torch" else NO_PROFILE
