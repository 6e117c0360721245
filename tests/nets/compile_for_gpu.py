"""Compiles every Triton kernel for an H100 without a GPU; a script of its own, as Triton must not interpret here.

Stands in for the driver, runs the differentiable functions on CPU tensors, and compiles each launch instead of running
it. Prints the names of the kernels for which machine code came out.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from esper_soa.nets.engines.gpu.block_autograd import Norm, conv_norm_relu_pool, evaluate_conv_relu_pool
from esper_soa.nets.engines.gpu.seed_autograd import ConvSeed, conv_seed, live_list

compiled: set[str] = set()
launch = jit.JITFunction.run


class H100:
    """Answers what Triton asks the driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(function: jit.JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
    """Takes the place of a launch."""
    kernel = launch(function, *args, grid=grid, warmup=True, **options)
    if kernel.asm["cubin"]:
        compiled.add(function.fn.__name__)


def call_everything(dtype: torch.dtype) -> None:
    """Forward and backward of a block and of a seed."""
    nets, channels = 2, 16
    x = torch.zeros(4, nets * channels, 8, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(nets, channels, channels, 3, 3, requires_grad=True)
    scale, shift = (torch.zeros(nets, channels, requires_grad=True) for _ in range(2))
    norm = Norm(scale, shift, torch.zeros(nets * channels), torch.ones(nets * channels))
    conv_norm_relu_pool(x.requires_grad_(), weight, norm, 2).sum().backward()
    evaluate_conv_relu_pool(x.detach(), weight.detach(), shift.detach(), 2)
    how = ConvSeed(live_list(torch.ones(nets, dtype=torch.bool)), torch.ones(nets), 1, False, False)
    conv_seed(x, weight, scale, shift, how).sum().backward()


driver.set_active(H100())
jit.JITFunction.run = compile_only
for name in sys.argv[1:]:
    call_everything(getattr(torch, name))
print(*sorted(compiled))
