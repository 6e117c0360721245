"""Compiles every Triton kernel for GPUs without having one; a process of its own, as Triton must
not interpret here.

    python -m benchmarks.compiled_kernels ARCHITECTURE... [--dtype NAME...] [--task NAME...]

Stands in for the driver, lets the engine train and validate on CPU tensors, and compiles each
launch instead of running it. Prints a JSON line per kernel, variant, architecture, dtype and task:
registers, bytes of a thread that did not fit them, shared memory, how many loads and stores there
are, and how many of these move 16 bytes. Products in float32 are TensorFloat-32, as in a run.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import triton
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
from esper_soa.training.build import build_world
from esper_soa.vocabulary import Blend, Stage

launch = jit.JITFunction.run
# bytes that a program can have, by architecture
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10}
DTYPES = ["bfloat16", "float32"]
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


class Launch(NamedTuple):
    """A launch that did not take place."""

    function: jit.JITFunction
    kernel: CompiledKernel
    grid: tuple[int, ...]
    arguments: dict[str, object]


@contextmanager
def compiled_for(architecture: int) -> Iterator[list[Launch]]:
    """Within it kernels are compiled instead of launched; all launches go into the list."""
    found = list[Launch]()

    def compile_launch(
        function: jit.JITFunction, *args: object, grid: tuple[int, ...], **options: object
    ) -> None:
        kernel = launch(function, *args, grid=grid, **(options | {"warmup": True}))
        given = dict(zip(function.arg_names, args, strict=False)) | options
        found.append(Launch(function, kernel, grid, given))

    driver.set_active(Device(architecture))
    blocks.shared_limit = lambda device: SHARED[architecture]
    jit.JITFunction.run = compile_launch
    yield found
    jit.JITFunction.run = launch
    blocks.shared_limit = shared_limit


def facts_of(kernel: CompiledKernel) -> dict[str, object]:
    """What the machine code of a kernel takes."""
    asm = kernel.asm
    metadata = kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.findall(r"(?:REG|STACK|LOCAL):(\d+)", usage))
    loads = widths_of(r"ld\.global[\w.:]*", asm["ptx"])
    loads += widths_of(r"cp\.async\.c[ag][^;]*", asm["ptx"])
    stores = widths_of(r"st\.global[\w.:]*", asm["ptx"])
    return {
        "registers": registers,
        "spilled_bytes": stack + local,
        "shared": metadata.shared,
        "warps": metadata.num_warps,
        "loads": loads.total(),
        "wide_loads": loads[16],
        "stores": stores.total(),
        "wide_stores": stores[16],
    }


def widths_of(pattern: str, code: str) -> Counter[int]:
    """How many instructions of a kind move so many bytes per thread."""
    found = Counter[int]()
    for name in re.findall(pattern, code):
        copied = re.search(r"\], 0x(\w+),", name) or re.search(r"\], (\d+)", name)
        many = re.search(r"\.v(\d)", name)
        bits = re.search(r"\.[bfsu](\d+)", name)
        if name.startswith("cp"):
            found[int(copied[1], 16) if copied else 0] += 1
        else:
            found[(int(many[1]) if many else 1) * (int(bits[1]) if bits else 0) // 8] += 1
    return found


def settings_of(task: str, images: int) -> TrainConfig:
    """An env-step of two networks with one batch of so many images."""
    chosen, slots = TASKS[task]
    return TrainConfig(
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


class Pass:
    """Births, a training batch and a validation of two networks; every slot has conv_light."""

    def __init__(self, task: str, dtype: torch.dtype) -> None:
        world = build_world(settings_of(task, 32), torch.device("cpu"))
        self.nets = world.rules.nets._replace(precision=dtype)
        self.weights = world.weights
        self.work = world.work(0)
        self.engine = GpuEngine()
        size = (2, len(self.nets.shape.slots))
        yes = np.ones(size, dtype=bool)
        no = np.zeros(size, dtype=bool)
        seeds = ActiveSeeds(yes, no + Stage.BLENDING, no + 1, no + Blend.ADD, no, yes, yes, no, no)
        self.alpha = torch.ones(size, dtype=torch.float64)
        resident = seeds.resident(torch.device("cpu"))
        self.seeds = self.engine.claim_(self.nets, self.weights, resident, self.work.seed_keys)

    def train(self) -> None:
        """A batch."""
        given = self.nets, self.weights, self.alpha, self.seeds
        self.engine.train_(*given, self.work.training, self.work.num_batches)

    def validate(self) -> None:
        """A batch."""
        given = self.nets, self.weights, self.alpha, self.seeds
        self.engine.validate(*given, self.work.validation)


def rows_of(launches: list[Launch]) -> Iterator[dict[str, object]]:
    """Kernel, variant by number and what it takes, by name; every variant once."""
    variants = dict[str, dict[str, CompiledKernel]]()
    for one in launches:
        variants.setdefault(one.function.fn.__name__, {})[one.kernel.hash] = one.kernel
    for name in sorted(variants):
        for number, kernel in enumerate(variants[name].values()):
            yield {"kernel": name, "variant": number} | facts_of(kernel)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("architectures", nargs="+", type=int)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--task", nargs="+", default=["baseline"], choices=TASKS)
    asked = parser.parse_args()
    for task, dtype, architecture in product(asked.task, asked.dtype, asked.architectures):
        with compiled_for(architecture) as launches:
            passes = Pass(task, getattr(torch, dtype))
            passes.train()
            passes.validate()
        place = {"architecture": architecture, "dtype": dtype, "task": task}
        for row in rows_of(launches):
            print(json.dumps(place | {"triton": triton.__version__} | row), flush=True)


if __name__ == "__main__":
    main()
