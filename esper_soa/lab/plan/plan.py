"""The answer of `esper-train --plan`: memory, pace, duration and disk of a run before it is begun.

The probe plays the run's own first round in a process of its own (probe.py), and tells what one env
takes. Where ranks share out the envs, as many probes play a share each, side by side. A run that
runtime/memory.py refuses has no plan.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Column, Table

from esper_soa.config.paths import user_path
from esper_soa.config.settings import LOWER, MAX_ENVS, TrainConfig, settings_yaml
from esper_soa.lab.plan.probe_result import ENDED, SETTINGS, ProbeResult
from esper_soa.system.errors import UserError
from esper_soa.system.json_lines import Json, json_line
from esper_soa.training.results.progress import duration

MIB = 2**20
GIB = 2**30
ROUND_FILES = ("metrics.jsonl", "episodes.jsonl", "telemetry")  # that grow with the rounds
UPPER_BOUND = ", at most (early_stop)"  # as the probe lets no episode end early
CHECKPOINT_FILES = ("checkpoint_", "networks")  # one of each goes with every checkpoint


class Disk(NamedTuple):
    """Bytes in the folder of the run."""

    whole: int  # of all rounds, and of the checkpoints and networks that are kept
    per_round: int  # of lines and tables
    free: int  # where the folder is to be


class Plan(NamedTuple):
    """Estimated cost of a run."""

    cfg: TrainConfig
    took: ProbeResult  # by a rank with its share of the envs
    disk: Disk

    @property
    def run_memory(self) -> int:
        """Bytes of the GPU of a rank, or else of its process without the program."""
        return self.took.device or self.took.host - self.took.program

    @property
    def most_envs(self) -> int:
        """The largest N that fits what is free, other settings kept; 0 where that is not known."""
        if self.took.free < 0:
            return 0
        more = int((self.took.free - self.run_memory) / self.took.per_env)
        return max(0, min(MAX_ENVS, self.cfg.ranks * (-(-self.cfg.envs // self.cfg.ranks) + more)))

    @property
    def fits(self) -> bool:
        """Whether the memory of the run does."""
        return self.took.free < 0 or self.most_envs >= self.cfg.envs

    @property
    def eps(self) -> float:
        """Env-steps per second of a round, as metrics.jsonl has them."""
        seconds = self.took.episode_seconds + self.took.update_seconds
        return self.cfg.round_env_steps / seconds

    @property
    def round_seconds(self) -> float:
        """Seconds of a round with its files."""
        timing = self.took
        return timing.episode_seconds + timing.update_seconds + timing.files_seconds

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        cfg = self.cfg
        timing = self.took
        controls = sum(
            timing.bare_seconds if name == "wait" else timing.episode_seconds
            for name in cfg.controls
        )
        if cfg.control_budget == "flop":  # as long as grown hosts cost, whichever the control
            controls = len(cfg.controls) * timing.episode_seconds
        rounds = cfg.rounds * self.round_seconds
        rounds += min(cfg.control_rounds, cfg.rounds) * controls
        return timing.build_seconds + rounds + timing.report_seconds

    def record(self) -> dict[str, Json]:
        """For programs: bytes and seconds."""
        cfg = self.cfg
        return {
            "name": cfg.name,
            "device": self.took.device_name,
            "envs": cfg.envs,
            "rounds": cfg.rounds,
            "steps": cfg.steps,
            "ranks": cfg.ranks,
            "memory": {
                "run": self.run_memory,
                "program": self.took.program,
                "process": self.took.host,
                "device": self.took.device,
                "per_env": self.took.per_env,
                "free": None if self.took.free < 0 else self.took.free,
                "least": self.took.least,
            },
            "most_envs": self.most_envs or None,
            "fits": self.fits,
            "eps": self.eps,
            "seconds": self.seconds,
            "env_steps": cfg.round_env_steps * cfg.rounds,
            "measured_env_steps": cfg.envs * self.took.measured_steps,
            "disk": {
                "run": self.disk.whole,
                "per_round": self.disk.per_round,
                "free": self.disk.free,
            },
        }


def show_plan(cfg: TrainConfig, console: Console) -> None:
    """Print the plan of every task of a run, and of several what they come to; UserError where it
    cannot run here, with the setting to lower.
    """
    plans = {name: make_plan(one) for name, one in cfg.by_task.items()}
    for name, plan in plans.items():
        if cfg.worlds:
            console.print(f"task {name}", highlight=False)
        console.print(plan_table(plan))
        console.print(verdict(plan), highlight=False, soft_wrap=True)
    if cfg.worlds:
        console.print(total_text([*plans.values()]), highlight=False, soft_wrap=True)


def show_plan_json(cfg: TrainConfig, console: Console) -> None:
    """The answer of `show_plan` in a line of JSON for every task."""
    for one in cfg.by_task.values():
        console.print(json_line(make_plan(one).record()), highlight=False, soft_wrap=True)


def total_text(plans: Sequence[Plan]) -> str:
    """Memory and time of the tasks of a run: all are in memory at once, and take turns."""
    memory = sum(plan.run_memory for plan in plans)
    free = min(plan.took.free for plan in plans)
    fits = "fits" if free < 0 or memory <= free else "does not fit: lower envs of a task"
    time = duration(sum(plan.seconds for plan in plans))
    disk = in_mib(sum(plan.disk.whole for plan in plans), 1)
    return f"all tasks: memory {in_mib(memory)}, time {time}, disk {disk}; {fits}"


def make_plan(cfg: TrainConfig) -> Plan:
    """Measure what a run of the settings takes, leaving nothing; UserError if it cannot run."""
    with tempfile.TemporaryDirectory(prefix="esper-plan-") as temporary:
        folder = Path(temporary).resolve()
        envs = -(-cfg.envs // cfg.ranks)  # of a rank that has most
        part = cfg if cfg.ranks == 1 else replace(cfg, ranks=1, restarts=0, envs=envs)
        (folder / SETTINGS).write_text(settings_yaml(part), encoding="utf-8")
        with ThreadPoolExecutor(cfg.ranks) as pool:
            results = [*pool.map(partial(run_probe, folder, cfg.ranks), range(cfg.ranks))]
        return Plan(cfg, slowest_rank(results), disk_of(folder / "0", cfg))


def slowest_rank(ranks: Sequence[ProbeResult]) -> ProbeResult:
    """Maximum cost over the ranks, and minimum of their free memory; on a CPU they share it."""
    most = ProbeResult(*map(max, zip(*ranks, strict=True)))
    free = min(probe.free for probe in ranks)
    return most._replace(
        device_name=ranks[0].device_name,
        free=free // len(ranks) if most.device_name == "cpu" else free,
        measured_steps=min(probe.measured_steps for probe in ranks),
    )


def run_probe(folder: Path, ranks: int, rank: int) -> ProbeResult:
    """Measurements of the probe of a rank, by SETTINGS in the folder; raises UserError where it was
    refused, or ran out of memory.
    """
    arguments = [str(folder), str(rank), str(ranks)]
    done = subprocess.run(
        [sys.executable, "-m", "esper_soa.lab.plan", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ProbeResult(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode == 2:
        raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    if done.returncode < 0:
        raise UserError(ENDED)
    raise RuntimeError(f"the probe failed:\n{done.stderr}")


def disk_of(folder: Path, cfg: TrainConfig) -> Disk:
    """The plan of a run of all ranks, from what the probe of one has left after two rounds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    rounds = sum(size for name, size in sizes.items() if name.startswith(ROUND_FILES))
    kept_bytes = sum(size for name, size in sizes.items() if name.startswith(CHECKPOINT_FILES))
    written = sum(name.startswith("checkpoint_") for name in sizes) or 1
    per_round = cfg.ranks * rounds // min(2, cfg.rounds)
    numbered = -(-cfg.rounds // cfg.checkpoint_every) if cfg.checkpoint_every else 1
    checkpoints = cfg.ranks * kept_bytes // written * min(cfg.checkpoint_keep, numbered)
    total = per_round * cfg.rounds + checkpoints + sum(sizes.values()) - rounds - kept_bytes
    place = user_path("run_dir", cfg.run_dir or "runs").resolve()
    while not place.exists():
        place = place.parent
    return Disk(total, per_round, shutil.disk_usage(place).free)


def plan_table(plan: Plan) -> Table:
    """The plan for people."""
    cfg = plan.cfg
    result = plan.took
    disk = plan.disk
    known = result.free >= 0
    device = result.device_name
    kind = device if cfg.ranks == 1 else device.partition(":")[0]
    each = f"of each of {cfg.ranks} ranks " if cfg.ranks > 1 else ""
    where = f"on {device}" if result.device else f"and {in_mib(result.program)} for the program"
    free = f"{result.free / GIB:.1f} GiB free" if known else "unknown"
    most = f"{plan.most_envs:,}" if known else "unknown"
    measured = f"{result.measured_steps} of {cfg.steps} env-steps measured"
    updating = f"{result.update_seconds:.1f} s of it the policy update"
    run = "with control and report" + UPPER_BOUND * cfg.early_stop.enabled
    free_text = f"{in_mib(disk.per_round, 2)} per round; {disk.free / GIB:.1f} GiB free"
    title = f"{cfg.name}: rounds={cfg.rounds} steps={cfg.steps} envs={cfg.envs} on {kind}"
    columns = ("", Column(justify="right"), Column(style="dim"))
    table = Table(*columns, title=title, box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_row("memory", in_mib(plan.run_memory), f"{each}{where}; {free}")
    table.add_row("memory per env", in_mib(plan.took.per_env, 2), "for every further env")
    table.add_row("largest envs", most, "other settings as they are")
    table.add_row("env-steps/s", f"{plan.eps:,.1f}", measured)
    table.add_row("a round", duration(plan.round_seconds), updating)
    table.add_row("the run", duration(plan.seconds), run)
    table.add_row("disk", in_mib(disk.whole, 1), free_text)
    return table


def in_mib(size: float, digits: int = 0) -> str:
    """Bytes in MiB, in words."""
    return f"{size / MIB:,.{digits}f} MiB"


def verdict(plan: Plan) -> str:
    """One line: whether the run fits, and what to lower where it does not."""
    faults = []
    if not plan.fits:
        fewer = f"envs to {plan.most_envs}, or " if plan.most_envs else ""
        faults.append(f"memory: lower {fewer}{LOWER.removeprefix('envs, ')}")
    if plan.disk.whole > plan.disk.free:
        faults.append("disk: lower telemetry.level or checkpoint_keep, or give another run_dir")
    return "does not fit: " + "; ".join(faults) if faults else "fits"
