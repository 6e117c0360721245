"""Image batches as one native call; nets/data.py makes the same of torch operations."""

import ctypes

import torch
from torch import Tensor

from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.engines.cpu.calls import call


class Crops(ctypes.Structure):
    """crops of images.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "size", "line", "colour")),
        *((name, ctypes.c_void_p) for name in ("bytes", "first", "values", "out")),
    ]


def crops_of(lines: Tensor, first: Tensor, values: Tensor) -> Crops:
    """The record of crops of a bank beginning at its bytes `first`; the tensors must outlive it."""
    record = Crops(line=lines.stride(1), colour=lines.stride(2))
    record.bytes = lines.data_ptr()
    record.first = first.data_ptr()
    record.values = values.data_ptr()
    return record


def cut(crops: Crops, batch: int, nets: int, size: int) -> Tensor:
    """Images float32 [B, size, size, n*3] of the crops, of which there are [B, n]."""
    out = torch.empty(batch, size, size, 3 * nets, dtype=torch.float32)
    crops.batch = batch
    crops.nets = nets
    crops.size = size
    crops.out = out.data_ptr()
    call("cut_images", crops)
    return out


def cut_images(crops: ImageCrops, dtype: torch.dtype) -> Tensor:
    """Normalised images [B, n*3, 32, 32] in channels_last; dtype: float32, all the kernel makes."""
    if dtype != torch.float32:
        raise TypeError(f"the native kernel cuts images in float32, not {dtype}")
    first = crops.first.T.contiguous()
    values = crops.bank.values.contiguous()
    batch, nets = first.shape
    return cut(crops_of(crops.bank.lines, first, values), batch, nets, IMAGE_SIZE).permute(
        0, 3, 1, 2
    )
