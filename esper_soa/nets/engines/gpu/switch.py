"""Whether this process computes host blocks with the Triton kernels: chosen once, read by nets/batched.py.

`choose` is called by the trainer with the setting compute.triton; without a call everything runs in plain torch, and
Triton is not even imported.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from esper_soa.errors import SettingError
from esper_soa.nets.engines.gpu.support import unavailable_reason

FUNCTIONS = "esper_soa.nets.engines.gpu.functions"
_kernels: ModuleType | None = None


def choose(setting: str, device: torch.device) -> None:
    """Turn the kernels on or off for this process; SettingError for `on` where they cannot run."""
    global _kernels
    _kernels = None
    reason = unavailable_reason(device) if setting != "off" else None
    if setting == "on" and reason is not None:
        raise SettingError("compute.triton", setting, "auto or off here", f"{reason[0].upper()}{reason[1:]}.")
    if setting == "on" or (setting == "auto" and reason is None and device.type == "cuda"):
        _kernels = importlib.import_module(FUNCTIONS)


def kernels_for(x: Tensor) -> ModuleType | None:
    """The module functions where the kernels are on and made for activations x, else None."""
    made_for = x.dim() == 4 and not x.is_meta and x.dtype in (torch.float32, torch.bfloat16)
    return _kernels if made_for and x.is_contiguous(memory_format=torch.channels_last) else None
