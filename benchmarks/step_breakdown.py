"""Where an env-step goes, for the engine and for the plain loop: phases, and the top operations
within each of them.

    python -m benchmarks.step_breakdown +work=b envs=8

Takes the settings of benchmarks/eps.py; the plain loop is here in this process, in one thread
unless baseline_threads says more. Phases are timed without a profiler, operations in one more
env-step with it (self time, in every thread; its own cost makes small operations look larger).
Prints tables and a JSON line last.
"""

import json
import statistics
import sys
from bisect import bisect_left
from collections import defaultdict

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, record_function

from benchmarks import machine
from benchmarks.eps import settings_from
from benchmarks.eps_config import EpsConfig
from benchmarks.loops import PlainLoop, tune
from benchmarks.report import declared
from benchmarks.sides import EngineSide
from esper_soa.errors import UserError
from esper_soa.ops.device import resolve_device
from esper_soa.ops.profile import PHASES, PhaseProfile, every_thread

MARK = "end of "
TOP = 12  # operations listed per phase
LISTED = ("training", "validation", "state")

# by phase and name: seconds of self time and calls
Operations = dict[str, dict[str, tuple[float, int]]]
Side = EngineSide | PlainLoop


class Marks(PhaseProfile):
    """Leaves a mark in the profiler's record where a phase ends."""

    def phase_ended(self, phase: str) -> None:
        """A range without content, by whose place in time operations are told apart."""
        with record_function(MARK + phase):
            pass


def ready_side(name: str, cfg: EpsConfig) -> Side:
    """The side of that name, warmed up."""
    if name == "engine":
        engine = EngineSide(cfg)
        engine.warm_up()
        return engine
    torch.set_num_threads(cfg.baseline_threads or 1)
    loop = PlainLoop(cfg, range(cfg.envs))
    tune(loop.forms(cfg, loop.device), loop.choose, loop.trial)
    loop.play(cfg.warmup)
    return loop


def phase_seconds(side: Side, cfg: EpsConfig) -> dict[str, float]:
    """Median seconds by phase of an env-step of all envs."""
    timings = []
    for _ in range(cfg.repeats):
        if isinstance(side, PlainLoop):
            torch.set_num_threads(cfg.baseline_threads or 1)
            played = side.play(cfg.timed_steps).phases
            timings.append({phase: seconds / cfg.timed_steps for phase, seconds in played.items()})
        else:
            timings.append(side.run().phases)
    return {phase: statistics.median(timing[phase] for timing in timings) for phase in timings[0]}


def operations(side: Side) -> Operations:
    """Self time and calls of every operation of one env-step of all envs, by the phase it began
    in.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (side.device.type == "cuda")
    watching = side.profile
    side.watch_with(Marks(side.device))
    with torch.profiler.profile(
        activities=activities, experimental_config=every_thread()
    ) as profiler:
        side.one_step()
    side.watch_with(watching)
    events = profiler.events() or []
    ends = sorted(
        (event.time_range.start, event.name) for event in events if event.name.startswith(MARK)
    )
    times = [end for end, _ in ends]
    found = defaultdict[str, dict[str, tuple[float, int]]](dict)
    for event in events:
        place = bisect_left(times, event.time_range.start)
        if event.name.startswith(MARK) or place == len(ends):
            continue
        spent = (
            event.self_device_time_total
            if side.device.type == "cuda"
            else event.self_cpu_time_total
        )
        of_phase = found[ends[place][1].removeprefix(MARK)]
        seconds, calls = of_phase.get(event.name, (0.0, 0))
        of_phase[event.name] = seconds + spent / 1e6, calls + 1
    return dict(found)


def phase_table(phases: dict[str, dict[str, float]], images: tuple[int, int]) -> Table:
    """Milliseconds and shares of both sides, and microseconds per image where images are what
    counts.
    """
    per_image = {"training": images[0], "validation": images[1]}
    table = Table("phase", title="an env-step of all envs", title_justify="left")
    for name in phases:
        for head in (f"{name}, ms", "share", "us/image"):
            table.add_column(head, justify="right")
    met = [phase for phase in PHASES if any(phase in found for found in phases.values())]
    for phase in met:
        cells = []
        for found in phases.values():
            seconds = found.get(phase)
            total = sum(found.values())
            cells += (
                ["-", "-", "-"]
                if seconds is None
                else [
                    f"{1e3 * seconds:.2f}",
                    f"{100 * seconds / total:.1f} %",
                    f"{1e6 * seconds / per_image[phase]:.1f}" if phase in per_image else "",
                ]
            )
        table.add_row(phase, *cells)
    return table


def operation_table(side: str, phase: str, found: dict[str, tuple[float, int]]) -> Table:
    """The operations that took longest."""
    total = sum(seconds for seconds, _ in found.values()) or 1.0
    table = Table(
        "operation",
        title=f"{side}, {phase}: {1e3 * total:.2f} ms in operations",
        title_justify="left",
    )
    for head in ("ms", "share", "calls"):
        table.add_column(head, justify="right")
    for name, (seconds, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:TOP]:
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{100 * seconds / total:.1f} %", str(calls))
    return table


def breakdown(cfg: EpsConfig, console: Console) -> dict[str, object]:
    """Measure and print both sides; returns all of it."""
    device = resolve_device(cfg.device)
    work = {
        "N": cfg.envs,
        "B": cfg.batch_size,
        "T": cfg.train_samples,
        "V": cfg.val_samples,
        "K": cfg.rows,
        "host": cfg.task.name,
        "slots": cfg.slots,
        "live": cfg.live,
        "blueprint": cfg.blueprint,
        "stage": cfg.stage,
        "live_envs": cfg.live_envs,
        "device": str(device),
    }
    console.print(declared(work), markup=False, highlight=False)
    sides = {name: ready_side(name, cfg) for name in cfg.sides if name != "bare"}
    phases = {name: phase_seconds(side, cfg) for name, side in sides.items()}
    for found in phases.values():
        found.pop("update", None)  # of a round, not of an env-step
    console.print(phase_table(phases, cfg.images))
    listed = {name: operations(side) for name, side in sides.items()}
    for name, by_phase in listed.items():
        console.print(f"{name}: {setup(sides[name])}", markup=False, highlight=False)
        for phase in LISTED:
            if by_phase.get(phase):
                console.print(operation_table(name, phase, by_phase[phase]))
    return {
        "benchmark": "step_breakdown",
        "work": work,
        "machine": machine.describe(device),
        "commit": machine.git_commit(),
        "phases": phases,
        "operations": listed,
    }


def setup(side: Side) -> str:
    """How the side is set up, in one line."""
    kept = ("threads", "workers", "env_chunk", "eval_batch", "val_batch", "fused_validation")
    return ", ".join(f"{name} {value}" for name, value in side.facts().items() if name in kept)


@hydra.main(version_base="1.3", config_path="conf", config_name="eps")
def main(composed: DictConfig) -> None:
    """Measure and print."""
    try:
        record = breakdown(settings_from(composed), Console(file=sys.stdout))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
