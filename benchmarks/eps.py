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
from benchmarks.opponents import LoopSide
from benchmarks.records import Record, Records, check_folder, finish, origin
from benchmarks.sides import make_side
from benchmarks.timing import COLUMNS, Timing, in_turns
from esper_soa.config.hydra_versions import MAIN
from esper_soa.runtime.device import resolve_device
from esper_soa.system.errors import UserError


class Contestant:
    """One side at one point, with what was noted while it was built and what it took."""

    def __init__(self, name: str, cfg: EpsConfig, stack: ExitStack) -> None:
        """Builds the side and warms it up; `stack` ends what it has started."""
        self.cfg = cfg
        device = resolve_device(cfg.device)
        before = machine.forget_peak(device)
        self.side = make_side(name, cfg)
        if isinstance(self.side, LoopSide):
            stack.callback(self.side.close)
        machine.forget_peak(device)
        self.side.warm_up()
        self.side.run()
        self.notes: Record = {"peak_mib": (machine.peak(device) - before) / machine.MIB}
        self.notes |= self.side.facts()  # of its processes where it has some
        self.timings: list[Timing] = []


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and number of env-steps of all envs, in ms, the update apart."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"median": 1e3 * cuts[49], "p95": 1e3 * cuts[94], "number": len(seconds)}


def side_record(contestant: Contestant) -> Record:
    """The columns of one side, and its phases."""
    cfg, timings = contestant.cfg, contestant.timings
    train, val = cfg.images
    columns: Record = {}
    for column in timings[0].columns:
        seconds = spread([timing.figures[column] for timing in timings])
        images = train if column == COLUMNS[0] else train + val
        columns[column] = {
            "eps": cfg.envs / seconds["median"],
            "images_per_second": images / seconds["median"],
            "ms_per_env_step": 1e3 * seconds["median"] / cfg.envs,
            "seconds": seconds,
        }
    phases = {
        phase: statistics.median(timing.phases[phase] for timing in timings)
        for phase in timings[0].phases
    }
    return {"columns": columns, "phases": phases, **contestant.notes}


def paired(
    bottom: Contestant, top: Contestant, per_env: bool = False
) -> dict[str, dict[str, float]]:
    """Spread of the ratio top over bottom of the timings of a turn, by their figures; per_env: of
    times per env.
    """
    scale = bottom.cfg.envs / top.cfg.envs if per_env else 1.0
    pairs = [(a.figures, b.figures) for a, b in zip(top.timings, bottom.timings, strict=True)]
    both = [name for name in pairs[0][0] if name in pairs[0][1]]
    return {name: spread([scale * a[name] / b[name] for a, b in pairs]) for name in both}


def work_record(cfg: EpsConfig) -> Record:
    """The declared work of a point."""
    return {
        "N": cfg.envs,
        "B": cfg.batch_size,
        "T": cfg.train_samples,
        "V": cfg.val_samples,
        "K": cfg.rows,
        "live": cfg.live,
        "blueprint": cfg.blueprint,
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
    with ExitStack() as stack:
        points = [[Contestant(side, point, stack) for side in cfg.sides] for point in cfg.points()]
        everyone = [contestant for at_point in points for contestant in at_point]
        before = clocks(everyone)
        for contestant in in_turns(everyone, cfg.repeats):
            contestant.timings.append(contestant.side.run())
        state["other_cores"] = other_cores(before, clocks(everyone))
        record["busy"] = state | {"load_after": machine.load()}
        for contestant in everyone:
            steps = contestant.side.step_times(cfg.percentile_steps)
            contestant.notes["env_step_ms"] = percentiles(steps)
            contestant.notes["syncs"] = contestant.side.syncs()
    record["points"] = [point_record(cfg, at_point, points[0]) for at_point in points]
    return record


class Clocks(NamedTuple):
    """In seconds: of the wall, of all processes of the machine, of ours."""

    wall: float
    everyone: float | None
    ours: float


def clocks(everyone: Sequence[Contestant]) -> Clocks:
    """Now; the processes of all sides are ours."""
    loops = [contestant.side for contestant in everyone if isinstance(contestant.side, LoopSide)]
    ours = time.process_time() + sum(side.processor_seconds() for side in loops)
    return Clocks(time.monotonic(), machine.everyones_seconds(), ours)


def other_cores(before: Clocks, now: Clocks) -> float | None:
    """Cores that other processes kept busy from `before` to `now`."""
    if before.everyone is None or now.everyone is None:
        return None
    theirs = now.everyone - before.everyone - (now.ours - before.ours)
    return max(0.0, theirs / (now.wall - before.wall))


def point_record(cfg: EpsConfig, at_point: list[Contestant], first: list[Contestant]) -> Record:
    """One point: work, sides, opponents' times over the engine's, sides over the first point."""
    point = at_point[0].cfg
    sides = {contestant.side.name: contestant for contestant in at_point}
    record: Record = {"vary": cfg.vary, "value": getattr(point, cfg.vary) if cfg.vary else None}
    record["work"] = work_record(point)
    record["sides"] = {name: side_record(contestant) for name, contestant in sides.items()}
    if "engine" in sides:
        engine = sides.pop("engine")
        record["ratios"] = {name: paired(engine, loop) for name, loop in sides.items()}
    if at_point is not first:
        record["over_first"] = {
            there.side.name: {"step": paired(here, there), "env_step": paired(here, there, True)}
            for here, there in zip(first, at_point, strict=True)
        }
    return record


def warn_of_noise(records: Records) -> list[str]:
    """What says that the machine was not quiet."""
    texts = {"load_before": "the load average was", "other_cores": "cores kept busy by others:"}
    busy = {name: records[0]["busy"][name] for name in texts}
    return [
        f"warning: {texts[name]} {value:.2f}; timings on a machine that is not quiet say little"
        for name, value in busy.items()
        if value is not None and value > machine.QUIET_LOAD
    ]


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
