"""Env-steps per second: the engine and its opponents at the same work, side by side in one run.

    python -m benchmarks.eps                         the default work
    python -m benchmarks.eps +work=b envs=64         a named work (benchmarks/conf/work), changed
    python -m benchmarks.eps -m '+work=a,b,c,d,f,g,t'  those of docs/numbers.md, one after the other

The opponents are "baseline", a plain loop that does the same work, and "bare", a loop over the
hosts alone; each uses the cores in the way that was quickest in its warm-up. The sides are timed in
turns, in alternating order; what counts is the ratio of two timings of a turn. Prints a table and,
last, one JSON line, which is also appended to benchmarks/results/, but not where files differ from
the commit.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import NamedTuple

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks import machine, sections
from benchmarks.eps_config import EpsConfig
from benchmarks.machine import compiled_graphs
from benchmarks.opponents import LoopSide
from benchmarks.records import Record, Records, check_folder, finish, origin
from benchmarks.sides import EngineSide, make_side
from benchmarks.timing import COLUMNS, Timing, in_turns
from esper_soa.config.hydra_versions import MAIN
from esper_soa.runtime.device import resolve_device
from esper_soa.system.errors import UserError


class Contestant:
    """One side at one point, with what was noted while it was built and what it took."""

    def __init__(self, name: str, cfg: EpsConfig, stack: ExitStack) -> None:
        """Builds the side and warms it up; `stack` ends what it has started."""
        graphs = compiled_graphs()
        begun = time.perf_counter()
        self.cfg = cfg
        device = resolve_device(cfg.device)
        before = machine.forget_peak(device)
        self.side = make_side(name, cfg)
        if isinstance(self.side, LoopSide):
            stack.callback(self.side.close)
        machine.forget_peak(device)
        self.side.warm_up()
        first = self.side.run()
        peak_mib = (machine.peak(device) - before) / machine.MIB
        self.notes: Record = {"peak_mib": peak_mib, "build_seconds": time.perf_counter() - begun}
        self.notes |= {"graphs": compiled_graphs() - graphs, "first_timing_seconds": first.total}
        self.notes |= self.side.facts()  # of its processes where it has some
        self.timings: list[Timing] = []


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "median": median,
        "lower": lower,
        "upper": upper,
        "low": min(values),
        "high": max(values),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile of env-steps of all envs, in ms, the update apart; and their
    number.
    """
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"median": 1e3 * cuts[49], "p95": 1e3 * cuts[94], "number": len(seconds)}


def cumulative(timing: Timing) -> dict[str, float]:
    """Seconds by column, each with those before it."""
    total = 0.0
    found = {}
    for column in COLUMNS:
        if column in timing.columns:
            total += timing.columns[column]
            found[column] = total
    return found


def side_record(one: Contestant) -> Record:
    """The columns of one side, and its phases."""
    cfg, train, val = one.cfg, *one.cfg.images
    columns: Record = {}
    for column in cumulative(one.timings[0]):
        seconds = spread([cumulative(timing)[column] for timing in one.timings])
        images = train if column == COLUMNS[0] else train + val
        columns[column] = {
            "eps": cfg.envs / seconds["median"],
            "images_per_second": images / seconds["median"],
            "ms_per_env_step": 1e3 * seconds["median"] / cfg.envs,
            "seconds": seconds,
        }
    phases = {
        phase: statistics.median(timing.phases[phase] for timing in one.timings)
        for phase in one.timings[0].phases
    }
    return {"columns": columns, "phases": phases, **one.notes}


def paired(
    bottom: Contestant, top: Contestant, per_env: bool = False
) -> dict[str, dict[str, float]]:
    """Spread of the ratio top over bottom of the timings of a turn, by cumulative column; "all" of
    everything, "alone" of policy and state machine alone. per_env: of times per env.
    """
    scale = bottom.cfg.envs / top.cfg.envs if per_env else 1.0
    pairs = [
        (cumulative(a), cumulative(b)) for a, b in zip(top.timings, bottom.timings, strict=True)
    ]
    found = {
        column: spread([scale * a[column] / b[column] for a, b in pairs])
        for column in COLUMNS
        if column in pairs[0][0] and column in pairs[0][1]
    }
    turns = list(zip(top.timings, bottom.timings, strict=True))
    found["all"] = spread([scale * a.total / b.total for a, b in turns])
    if all(COLUMNS[2] in timing.columns for pair in turns for timing in pair):
        found["alone"] = spread(
            [scale * a.columns[COLUMNS[2]] / b.columns[COLUMNS[2]] for a, b in turns]
        )
    return found


def work_record(cfg: EpsConfig, device: torch.device) -> Record:
    """The declared work of a point."""
    return {
        "N": cfg.envs,
        "B": cfg.batch_size,
        "T": cfg.train_samples,
        "V": cfg.val_samples,
        "K": cfg.rows,
        "live": cfg.live,
        "blueprint": cfg.blueprint,
        "slots": cfg.slots,
        "host": cfg.task.name,
        "device": str(device),
        "train_images": cfg.images[0],
        "val_images": cfg.images[1],
        "episode": cfg.steps,
        "policy": cfg.policy.init if cfg.grow else None,  # whose seeds grow
    }


def benchmark(cfg: EpsConfig) -> Record:
    """Build, warm up, take turns, and put it all into one record."""
    device = resolve_device(cfg.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.benchmark = True
    record = origin("eps", device) | {"name": cfg.name, "settings": asdict(cfg)}
    state: Record = {"load_before": machine.load()}
    record["limits"] = machine.limits(device) if cfg.limits else None
    points = cfg.points()
    with ExitStack() as stack:
        contestants = [[Contestant(side, point, stack) for side in cfg.sides] for point in points]
        everyone = [one for at_point in contestants for one in at_point]
        graphs = compiled_graphs()
        before = clocks(everyone)
        for one in in_turns(everyone, cfg.repeats):
            one.timings.append(one.side.run())
        state["other_cores"] = other_cores(before, clocks(everyone))
        record |= {
            "busy": state | {"load_after": machine.load()},
            "recompiled": compiled_graphs() - graphs,
        }
        for one in everyone:
            if isinstance(one.side, EngineSide):
                one.notes["env_step_ms"] = percentiles(one.side.step_seconds[one.cfg.timed_steps :])
            one.notes["syncs"] = one.side.syncs()
    first = contestants[0]
    record["points"] = [point_record(cfg, one, first, device) for one in contestants]
    return record


class Clocks(NamedTuple):
    """In seconds: of the wall, of all processes of the machine, of ours."""

    wall: float
    everyone: float | None
    own: float


def clocks(everyone: Sequence[Contestant]) -> Clocks:
    """Now; the processes of all sides are ours."""
    loops = [one.side for one in everyone if isinstance(one.side, LoopSide)]
    own = time.process_time() + sum(side.processor_seconds() for side in loops)
    return Clocks(time.monotonic(), machine.everyones_seconds(), own)


def other_cores(before: Clocks, now: Clocks) -> float | None:
    """Cores that other processes kept busy from `before` to `now`."""
    if before.everyone is None or now.everyone is None:
        return None
    theirs = now.everyone - before.everyone - (now.own - before.own)
    return max(0.0, theirs / (now.wall - before.wall))


def point_record(
    cfg: EpsConfig, at_point: list[Contestant], first: list[Contestant], device: torch.device
) -> Record:
    """One point: work, sides, opponents' times over the engine's, sides over the first point."""
    point = at_point[0].cfg
    by_name = {one.side.name: one for one in at_point}
    record: Record = {"vary": cfg.vary, "value": getattr(point, cfg.vary) if cfg.vary else None}
    record |= {
        "work": work_record(point, device),
        "sides": {name: side_record(one) for name, one in by_name.items()},
    }
    if "engine" in by_name:
        engine = by_name.pop("engine")
        record["ratios"] = {name: paired(engine, one) for name, one in by_name.items()}
    if at_point is not first:
        record["over_first"] = {
            one.side.name: {
                "step": paired(start, one),
                "env_step": paired(start, one, per_env=True),
            }
            for start, one in zip(first, at_point, strict=True)
        }
    return record


def warn_of_noise(records: Records) -> list[str]:
    """What says that the machine was not quiet."""
    state = records[0]["busy"]
    found = []
    for name, text in (
        ("load_before", "the load average was"),
        ("other_cores", "cores kept busy by others:"),
    ):
        if state[name] is not None and state[name] > machine.QUIET_LOAD:
            found.append(
                f"warning: {text} {state[name]:.2f}; timings on a machine that is not quiet say "
                "little"
            )
    return found


def settings_from(composed: DictConfig) -> EpsConfig:
    """The checked settings; raises UserError."""
    try:
        settings = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError("configuration: " + " ".join(str(error).split())) from error
    assert isinstance(settings, EpsConfig)
    return settings


ConfigStore.instance().store(name="eps_schema", node=EpsConfig)


@hydra.main(config_path="conf", config_name="eps", **MAIN)
def main(composed: DictConfig) -> None:
    """Measure, print, keep."""
    try:
        cfg = settings_from(composed)
        check_folder(cfg.results)
        record = benchmark(cfg)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for make in (sections.sides, *sections.EPS.values(), warn_of_noise):
        print("\n".join(make([record])))
    finish(record, cfg.results, cfg.name)


if __name__ == "__main__":
    main()
