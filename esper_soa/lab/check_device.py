"""The tables of `esper-train --check-device`: every engine on the shapes of a run, and memory.

It measures anew and keeps nothing.
"""

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from esper_soa.config.settings import TrainConfig
from esper_soa.nets.choose import probe_engines
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.needs import GIB, MIB, Need, at_once
from esper_soa.nets.setup import Setup
from esper_soa.nets.trial import TrialResult
from esper_soa.runtime import device as devices
from esper_soa.runtime.memory import free_memory, needs, room_for_engine
from esper_soa.training.loop.build import make_setup

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
        setup = make_setup(task_cfg, device)
        with devices.threads(setup.compute.threads):
            place = devices.device_name(device, setup.workers, setup.precision)
            console.print(place, highlight=False)
            engines = probe_engines(setup, synthetic, room_for_engine(setup, task_cfg.policy))
        console.print(engine_table(engines, setup))
        for rule in DEVICE_RULES[device.type]:
            console.print(rule, highlight=False)
        console.print(memory_table(needs(setup, task_cfg.policy), device))


def engine_table(engines: list[TrialResult], setup: Setup) -> Table:
    """A row per engine."""
    work = f"N={setup.num_envs} B={setup.batch_size}"
    samples = f"T={setup.train_samples} V={setup.val_samples}"
    title = f"engines at {work} {samples}, {setup.task.name}"
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


def memory_table(parts: list[Need], device: torch.device) -> Table:
    """The needs of a run, the largest first, and what is free."""
    table = Table(title="memory, at least", box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for need in sorted(parts, key=lambda need: -need.size):
        table.add_row(need.what, f"{need.size / MIB:.1f} MiB")
    table.add_row("together, as far as at the same time", f"{at_once(parts) / MIB:.1f} MiB")
    free = free_memory(device)
    table.add_row(f"free on {device}", "unknown" if free is None else f"{free / GIB:.1f} GiB")
    return table
