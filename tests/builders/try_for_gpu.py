"""Tries the GPU's kernels by Triton's own compiler and launcher beside a driver that launches
nothing; a script of its own, as Triton must not interpret here.

    python try_for_gpu.py FAULT ARCHITECTURE TASK

The folder of a libcuda.so.1 made of stand_in_driver.c must be first in LD_LIBRARY_PATH. Prints
what the trial says of the kernels: "broken kernel" has one that does not compile; of a compiler
that does not work, or of the shared memory, the environment tells. Hosts are in float32.
"""

import os
import sys
from functools import cached_property

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from esper_soa.nets import trial as trials
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.engines.gpu import blocks
from esper_soa.nets.engines.gpu.engine import GpuEngine
from esper_soa.nets.engines.gpu.kernels import newborn
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.training.loop.build import make_setup
from tests.builders.compiled_kernels import Device, settings_of


class LaunchingDevice(Device):
    """Has Triton's launcher, made at the first launch, as on a machine with a GPU."""

    launcher_cls = CudaLauncher

    @cached_property
    def utils(self) -> CudaUtils:
        return CudaUtils()


@triton.jit
def broken_kernel(seed_inits, seeds, num_slots: tl.constexpr, tile: tl.constexpr):
    tl.arange(0, tile + 1)


def main() -> None:
    driver.set_active(LaunchingDevice(int(sys.argv[2])))
    if "FAKE_SMEM" in os.environ:
        blocks.shared_limit = lambda device: int(os.environ["FAKE_SMEM"])
    if sys.argv[1] == "broken kernel":
        newborn.newborn_kernel = broken_kernel
    trials.PASSES = trials.TIMED
    makers = {"torch": TorchEngine, "triton": GpuEngine}
    setup = make_setup(settings_of(sys.argv[3], 2), torch.device("cpu"))
    for result in trials.try_engines(setup, synthetic, TorchEngine, "torch", makers):
        print(result.words())


if __name__ == "__main__":
    main()
