"""How much a program of a kernel does at a time, and the shared memory that it takes for it: by
sizes, format and device, known before anything is compiled.

Imports no Triton: who chooses an engine asks here what fits.
"""

from typing import NamedTuple

import torch

LEAST_SHARED = 99 << 10  # bytes for a program on the smallest GPUs that are supported
RESERVED_BYTES = 1024  # bytes that a program takes beside its own
BLOCK_NUMBERS = 4096  # of a tile: pixels times channels; with more the registers do not suffice
MAX_BLOCK_PIXELS = 128
GROUP_BYTES = 128
SLOT_NUMBERS = 1024  # of a tile: pixels times channels; with more the registers do not suffice
LOOP_STAGES = (3, 1)  # of a loop: so many loads are under way, each in shared memory of its own
WEIGHT_BYTES = 4  # bytes of a weight


class TileSizes(NamedTuple):
    """Sizes of a program; powers of two."""

    pixels: int
    columns: int  # of the implicit matrix, taken up per step
    group: int  # of its columns, whose gradients are summed up together
    stages: int
    shared: int  # bytes that suffice


def padded(count: int) -> int:
    """The power of two, at least 16, that holds `count`."""
    return max(16, 1 << (count - 1).bit_length())


def lanes_of(channels: int) -> int:
    """Channels of a tile: the power of two that holds them; a product gives no fewer than 8."""
    return max(8, 1 << (channels - 1).bit_length())


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; without a GPU those of the smallest."""
    if device.type != "cuda":
        return LEAST_SHARED
    known = torch.cuda.get_device_properties(device)
    return int(known.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def block_tile(inputs: int, outputs: int, taps: int, dtype: torch.dtype, limit: int) -> TileSizes:
    """Sizes of a block's kernels, with as many stages as leave room for a second program, or one.

    A step holds a tile of pixels beside one of weights. Gradients of weights have one stage, of two
    tiles of pixels; sums and whole tiles are rearranged in shared memory at the end.
    """
    width = padded(max(inputs, outputs))
    columns = min(16 if inputs <= 8 else 32, padded(inputs * taps))
    group = min(GROUP_BYTES // dtype.itemsize, padded(inputs * taps))
    pixels = min(MAX_BLOCK_PIXELS, BLOCK_NUMBERS // width)
    step = pixels * columns * dtype.itemsize + columns * width * WEIGHT_BYTES
    operands = pixels * (group + width) * dtype.itemsize
    least = max(operands, max(group, pixels) * width * WEIGHT_BYTES)
    fitting = [
        TileSizes(pixels, columns, group, stages=stages, shared=max(stages * step, least))
        for stages in LOOP_STAGES
    ]
    half = limit // 2 - RESERVED_BYTES // 2
    return next((sizes for sizes in fitting if sizes.shared <= half), fitting[-1])


class SlotTile(NamedTuple):
    """Sizes of a program of a slot; powers of two."""

    pixels: int
    columns: int  # of the implicit matrix of a convolution, taken up per step
    group: int  # of its columns, whose gradients are summed up together
    shared: int


def slot_tile(lanes: int, dtype: torch.dtype) -> SlotTile:
    """Sizes of a slot's kernels, which load nothing ahead."""
    pixels = max(SLOT_NUMBERS // lanes, 16)
    columns = 16 if lanes == 8 else 32
    group = 64 if lanes <= 32 else 32
    operands = max(columns * (pixels + lanes), pixels * (lanes + group)) * dtype.itemsize
    return SlotTile(pixels, columns, group, shared=max(operands, lanes * group * WEIGHT_BYTES))
