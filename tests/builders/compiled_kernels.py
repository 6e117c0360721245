"""Compiles every Triton kernel for a GPU without having one; a script of its own, as Triton must
not interpret here.

    python compiled_kernels.py ARCHITECTURE DTYPE TASK

A stand-in for the driver lets the engine train and validate on CPU tensors, and each launch is
compiled instead of run. The script prints a JSON line per kernel and variant: registers, bytes of a
thread that did not fit into them, shared memory and warps. Products in float32 are TensorFloat-32,
as in a run.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.nets.engines.gpu import blocks
from esper_soa.nets.engines.gpu.engine import GpuEngine
from esper_soa.nets.engines.gpu.tile_sizes import shared_limit
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Stage

launch = jit.JITFunction.run
# bytes that a program can have, by architecture
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
TASKS = {
    "baseline": (TaskConfig(), ["r0c0", "r0c1", "r0c2"]),
    "wide": (TaskConfig(name="wide", base_channels=32), ["r0c0", "r0c1", "r0c2"]),
    "small": (
        TaskConfig(name="small", base_channels=2, num_blocks=2, num_pools=1),
        ["r0c0", "r1c0", "r0c1"],
    ),
}


class Device:
    """Answers what Triton asks the driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # what is compiled for one device is kept for that device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


Kernels = dict[str, dict[str, CompiledKernel]]  # variants by hash, by the kernel's name


@contextmanager
def compiled_for(architecture: int) -> Iterator[Kernels]:
    """Within it kernels are compiled instead of launched, and go into the table."""
    found: Kernels = {}

    def compile_launch(
        function: jit.JITFunction, *args: object, grid: tuple[int, ...], **options: object
    ) -> None:
        kernel = launch(function, *args, grid=grid, **(options | {"warmup": True}))
        found.setdefault(function.fn.__name__, {})[kernel.hash] = kernel

    driver.set_active(Device(architecture))
    blocks.shared_limit = lambda device: SHARED[architecture]
    jit.JITFunction.run = compile_launch
    yield found
    jit.JITFunction.run = launch
    blocks.shared_limit = shared_limit


def facts_of(kernel: CompiledKernel) -> dict[str, int]:
    """What a program of the kernel takes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.findall(r"(?:REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": registers,
        "spilled_bytes": stack + local,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }


def settings_of(task: str, images: int) -> TrainConfig:
    """An env-step of two networks with one batch of so many images."""
    chosen, slots = TASKS[task]
    return TrainConfig(
        device="cpu",
        envs=2,
        steps=1,
        rounds=1,
        batch_size=images,
        train_samples=images,
        val_samples=images,
        task=chosen,
        slots=slots,
        data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=32),
        compute=ComputeConfig(workers=1, engine="torch"),
    )


def launch_all(task: str, dtype: torch.dtype) -> None:
    """Births, a training batch and a validation of two networks; every slot has conv_light."""
    world = build_world(settings_of(task, 32), torch.device("cpu"))
    nets = world.rules.setup._replace(precision=dtype)
    work = world.work(0)
    engine = GpuEngine()
    size = (2, len(nets.shape.slots))
    yes = np.ones(size, dtype=bool)
    no = np.zeros(size, dtype=bool)
    seeds = ActiveSeeds(yes, no + Stage.BLENDING, no + 1, no + Blend.ADD, no, yes, yes, no, no)
    alpha = torch.ones(size, dtype=torch.float64)
    resident = seeds.resident(torch.device("cpu"))
    claimed = engine.claim_(nets, world.weights, resident, work.seed_keys)
    engine.train_(nets, world.weights, alpha, claimed, work.training, work.num_batches)
    engine.validate(nets, world.weights, alpha, claimed, work.validation)


def main(architecture: str, dtype: str, task: str) -> None:
    """Print what every variant of every kernel takes."""
    with compiled_for(int(architecture)) as kernels:
        launch_all(task, getattr(torch, dtype))
    for name, variants in sorted(kernels.items()):
        for kernel in variants.values():
            print(json.dumps({"kernel": name} | facts_of(kernel)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
