"""Between tensors and the C kernels: memory layouts, and the sheet that a call takes.

Used by block.py, seed.py and the other callers of kernels, which know what the fields of their records mean.
"""

import ctypes
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from esper_soa.nets.engines.cpu.library import LANES, Sheet, library


def whole_vectors(channels: int) -> int:
    """Channels of the kernels' own images: P in sheet.h."""
    return -(-channels // LANES) * LANES


def pixels_last(x: Tensor) -> Tensor:
    """x as the kernels read it."""
    return x.contiguous(memory_format=torch.channels_last)


def new_activations(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Uninitialised [B, channels, height, width] in channels_last memory, whatever the sizes."""
    return like.new_empty(like.shape[0], height, width, channels).permute(0, 3, 1, 2)


def new_sheet(x: Tensor, weight: Tensor) -> Sheet:
    """Sizes, x [B, n*I or I, H, W] and weight [n, O, I, k, k] entered, the rest empty."""
    nets, out_channels, in_channels, kernel, _ = weight.shape
    sheet = Sheet(
        batch=x.shape[0], nets=nets, in_channels=in_channels, out_channels=out_channels, height=x.shape[2],
        width=x.shape[3], kernel=kernel, x_pixel=x.shape[1], x_net=0 if x.shape[1] == in_channels else in_channels,
        out_net=out_channels,
    )  # fmt: skip
    sheet.x, sheet.weight = x.data_ptr(), weight.data_ptr()
    return sheet


def call(kernel: str, record: ctypes.Structure) -> None:
    """Run a kernel on its record; other Python threads go on meanwhile. A profiler sees it as native::`kernel`."""
    with record_function(f"native::{kernel}") if profiler._is_profiler_enabled else nullcontext():
        if library()[kernel](ctypes.byref(record)):
            raise MemoryError(f"no memory for the scratch of {kernel}")
