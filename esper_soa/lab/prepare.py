"""`esper-train --prepare`: makes what the first run of these settings on a machine would make or go
without, for images of clusters and for tests.
"""

from rich.console import Console

from esper_soa.config.settings import TrainConfig
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.step_cache import stored_kernels
from esper_soa.training.loop.build import build_world


def prepare(cfg: TrainConfig, console: Console) -> None:
    """Build the worlds of `cfg`, task by task: kernels of the networks, data and tokens; and wait
    for the step kernels. Says what there is. Raises UserError for what cannot run.
    """
    for task_cfg in cfg.by_task.values():
        world = build_world(task_cfg, resolve_device(task_cfg.device))
        step_kernels = f"not compiled (compute.compile={task_cfg.compute.compile})"
        if task_cfg.compute.compile != "off":
            step_kernels = stored_kernels(world.rules, world.setup.num_envs, 0, wait=True).reason
        lines = {
            "data": world.data.source,
            "kernels": world.rules.engine.chosen.reason,
            "state": f"kernels of the env state: {step_kernels}",
        }
        for label, text in lines.items():
            console.print(f"{label:<8} {text}", highlight=False, soft_wrap=True)
