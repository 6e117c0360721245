"""Image batches as one native call; nets/data.py makes the same of torch operations."""

import ctypes

import torch
from torch import Tensor

from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.engines.cpu.sheet import call


class Crops(ctypes.Structure):
    """crops of images.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "size", "line", "colour")),
        *((name, ctypes.c_void_p) for name in ("bytes", "first", "values", "out")),
    ]


def cut_images(crops: ImageCrops, dtype: torch.dtype) -> Tensor:
    """Normalised images [B, n*3, 32, 32] in channels_last; dtype: float32, which is all that the kernel makes."""
    lines, first, values = crops.bank.lines, crops.first.T.contiguous(), crops.bank.values.contiguous()
    if dtype != torch.float32:
        raise TypeError(f"the native kernel cuts images in float32, not {dtype}")
    out = values.new_empty(first.shape[0], IMAGE_SIZE, IMAGE_SIZE, 3 * first.shape[1])
    record = Crops(
        batch=first.shape[0], nets=first.shape[1], size=IMAGE_SIZE, line=lines.stride(1), colour=lines.stride(2)
    )
    record.bytes, record.first = lines.data_ptr(), first.data_ptr()
    record.values, record.out = values.data_ptr(), out.data_ptr()
    call("cut_images", record)
    return out.permute(0, 3, 1, 2)
