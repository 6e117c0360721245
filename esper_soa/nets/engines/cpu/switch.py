"""Whether this process computes with the native kernels: chosen once at start-up, read by nets/batched.py, data.py and
supervised.py.

`choose` is called by the trainer with the setting compute.native; without a call everything runs in plain torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.errors import SettingError
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.proof import prove


class Choice(NamedTuple):
    """What was chosen and why, in words for logs."""

    native: bool
    reason: str
    fallback: bool = False  # they belong here, yet cannot run


_current = Choice(False, "plain torch")


def current() -> Choice:
    """What `choose` chose last."""
    return _current


def choose(setting: str, device: torch.device, dtype: torch.dtype = torch.float32, obstacle: str = "") -> Choice:
    """Turn the native kernels on or off for this process; builds and proves them where they are wanted.

    obstacle: why the networks of this run cannot be left to them, where that is so. Raises SettingError for `on` where
    they cannot run; `auto` then stays with torch and says why.
    """
    global _current
    _current = _weigh(setting, device, dtype, obstacle)
    if setting == "on" and not _current.native:
        raise SettingError("compute.native", setting, "auto or off here", _current.reason)
    return _current


def _weigh(setting: str, device: torch.device, dtype: torch.dtype, obstacle: str) -> Choice:
    if setting == "off":
        return Choice(False, "plain torch (compute.native=off)")
    if device.type != "cpu" or dtype != torch.float32:
        return Choice(False, f"plain torch (native kernels are for float32 on a CPU, not {dtype} on {device.type})")
    if obstacle:
        return Choice(False, f"plain torch, slower: no native kernels, {obstacle}", fallback=True)
    try:
        prove()
    except NativeError as error:
        return Choice(False, f"plain torch, slower: no native kernels, {error}", fallback=True)
    return Choice(True, "native, compiled for this CPU")


def takes(x: Tensor, dims: int = 4) -> bool:
    """True where the kernels are on and made for x, which they want with `dims` dimensions."""
    return _current.native and x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == dims


def takes_images(lines: Tensor, dtype: torch.dtype) -> bool:
    """True where the kernels are on and make batches of `dtype` from the bytes of an image bank."""
    return _current.native and lines.device.type == "cpu" and dtype == torch.float32
