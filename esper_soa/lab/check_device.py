"""The tables of `esper-train --check-device`: every engine on the shapes of a run, and memory.

It measures anew and keeps nothing.
"""

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.config.settings import TrainConfig
from esper_soa.nets.choose import probe_engines
from esper_soa.nets.trial import TrialResult
from esper_soa.runtime import device as devices
from esper_soa.runtime.memory import GIB, at_once, free_memory, needs
from esper_soa.training.loop.build import trial_of

MIB = 2**20
DEVICE_RULES = {
    "cpu": (
        "compute.engine=auto takes the native kernels of a CPU wherever they are proven, "
        "whatever the times.",
        "compute.cuda_graphs=auto replays nothing on a CPU.",
    ),
    "cuda": (
        "compute.engine=auto takes the last of the table that agrees, or torch where that takes "
        "less than half the time.",
        "compute.cuda_graphs=auto replays state machine, policy and gradient steps, and goes on "
        "without what cannot be captured.",
    ),
}


def check_device(cfg: TrainConfig, console: Console) -> None:
    """Try the engines on the device of `cfg`, a table per task; UserError where there is none."""
    for task_cfg in cfg.by_task.values():
        device = devices.resolve_device(task_cfg.device)
        devices.take_device(device)
        devices.keep_freed_memory(device)
        with devices.threads(task_cfg.compute.threads):
            trial = trial_of(task_cfg, device)
            place = devices.device_name(device, trial.nets.workers, trial.nets.precision)
            console.print(place, highlight=False)
            engines = probe_engines(trial)
        console.print(engine_table(engines, task_cfg))
        for rule in DEVICE_RULES[device.type]:
            console.print(rule, highlight=False)
        console.print(memory_table(task_cfg, device))


def engine_table(engines: list[TrialResult], cfg: TrainConfig) -> Table:
    """A row per engine."""
    work = f"N={cfg.envs} B={cfg.batch_size} T={cfg.train_samples} V={cfg.val_samples}"
    title = f"engines at {work}, {cfg.task.name}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for heading in ("engine", "ms per env-step", "MiB", "off torch in float32", "verdict"):
        right = heading in ("ms per env-step", "MiB")
        table.add_column(heading, justify="right" if right else "left")
    agreeing = [engine for engine in engines if not engine.dropped]
    best = min(agreeing, key=lambda engine: engine.seconds, default=None)
    for engine in engines:
        if engine.dropped:
            table.add_row(engine.name, "", "", "", engine.dropped)
            continue
        memory = f"{engine.memory / MIB:.0f}" if engine.memory else ""
        verdict = "agrees, quickest" if engine is best else "agrees"
        pace = f"{1e3 * engine.seconds:.2f}"
        table.add_row(engine.name, pace, memory, f"{engine.error:.1e}", verdict)
    return table


def memory_table(cfg: TrainConfig, device: torch.device) -> Table:
    """Memory that the run needs, and memory that is free."""
    table = Table(title="memory, at least", box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    parts = sorted(needs(cfg, device), key=lambda need: -need.size)
    for need in parts:
        table.add_row(need.what, f"{need.size / MIB:.1f} MiB")
    table.add_row("together, as far as at the same time", f"{at_once(parts) / MIB:.1f} MiB")
    free = free_memory(device)
    table.add_row(f"free on {device}", "unknown" if free is None else f"{free / GIB:.1f} GiB")
    return table
