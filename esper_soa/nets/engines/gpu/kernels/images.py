"""Images cut from the bank of bytes: crop, mirror, normalise and cast in one pass."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.config.nets import IMAGE_SIZE
from esper_soa.nets.data.images import ImageBank
from esper_soa.nets.engines.gpu.kernels.tiles import EXACT

CUT_PIXELS = 256  # pixels of an image that are cut at a time


class Crops(NamedTuple):
    """Where images begin in a bank, and how its bytes become numbers; see data.ImageBank."""

    lines: Tensor  # uint8 [M, H, 3, W]
    first: Tensor  # int64 [n, images]: the byte at which each begins
    images: int  # per network
    line: int  # bytes from line to line
    colour: int  # and from colour to colour
    env_stride: tl.constexpr  # numbers between the scales of two networks; 0: all have the same
    scale: Tensor  # float32 [3] or [n, 3]
    offset: Tensor


def crops_record(bank: ImageBank, first: Tensor) -> Crops:
    """The kernel's record of images that begin at bytes `first` of a bank, int64 [n, images]."""
    return Crops(
        bank.lines,
        first,
        first.shape[1],
        line=bank.lines.stride(1),
        colour=bank.lines.stride(2),
        env_stride=tl.constexpr(bank.scale.stride(0) if bank.scale.dim() == 2 else 0),
        scale=bank.scale,
        offset=bank.offset,
    )


def cut_(crops: Crops, counter: Tensor, images: Tensor) -> None:
    """images [n, B, 1024, 4]: those of the batch that `counter` (int32 [1]) tells."""
    num_nets, batch = images.shape[:2]
    cut_kernel[num_nets, batch](
        crops, batch, counter, images, side=IMAGE_SIZE, tile=CUT_PIXELS, **EXACT
    )


@triton.jit
def cut_kernel(crops, batch, counter, target, side: tl.constexpr, tile: tl.constexpr):
    """target [n, B, side * side, 4] = images counter * B and on: RGB and a zero. Grid (n, B)."""
    env = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1)
    number = tl.load(counter) * batch + image
    first = tl.load(crops.first + env * crops.images + number)
    colour = tl.arange(0, 4)
    known = colour < 3
    place = env * crops.env_stride + colour
    scale = tl.load(crops.scale + place, mask=known, other=0.0)
    offset = tl.load(crops.offset + place, mask=known, other=0.0)
    start = target + (env * batch + image) * (side * side * 4)
    for begin in range(0, side * side, tile):
        pixels = begin + tl.arange(0, tile)
        pixel = pixels // side * crops.line + pixels % side
        byte = first + pixel[:, None] + (colour * crops.colour)[None, :]
        mask = (pixels < side * side)[:, None] & known[None, :]
        values = tl.load(crops.lines + byte, mask=mask, other=0).to(tl.float32)
        values = values * scale[None, :] + offset[None, :]
        inside = (pixels < side * side)[:, None] & (colour < 4)[None, :]
        tl.store(start + pixels[:, None] * 4 + colour[None, :], values, mask=inside)
