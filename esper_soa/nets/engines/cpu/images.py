"""Image batches as one native call; nets/data.py makes the same of torch operations."""

import ctypes

from torch import Tensor

from esper_soa.nets.engines.cpu.sheet import call


class Crops(ctypes.Structure):
    """crops of images.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "size", "line", "colour")),
        *((name, ctypes.c_void_p) for name in ("bytes", "first", "values", "out")),
    ]


def cut_images(lines: Tensor, first: Tensor, values: Tensor, size: int) -> Tensor:
    """Images [B, n*3, size, size] in channels_last of the crops that begin at the bytes `first` (int64 [B, n]).

    lines: uint8 [M, H, 3, W]. values: float32 [3, 256], what a byte stands for in each colour.
    """
    first, values = first.contiguous(), values.contiguous()
    out = values.new_empty(first.shape[0], size, size, 3 * first.shape[1])
    record = Crops(batch=first.shape[0], nets=first.shape[1], size=size, line=lines.stride(1), colour=lines.stride(2))
    record.bytes, record.first = lines.data_ptr(), first.data_ptr()
    record.values, record.out = values.data_ptr(), out.data_ptr()
    call("cut_images", record)
    return out.permute(0, 3, 1, 2)
