"""Says whether the native kernels compute for a run, and why; builds and proves them where they are
wanted.

Asked by nets/choose.py with the setting compute.engine.
"""

import torch

from esper_soa.errors import SettingError
from esper_soa.nets.engine import Choice, Engine
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.library import kernels
from esper_soa.nets.engines.cpu.proof import prove

NAME = "native"  # in compute.engine


def choose_native(
    setting: str,
    device: torch.device,
    exact: Engine,
    dtype: torch.dtype = torch.float32,
    obstacle: str = "",
) -> Choice:
    """Whether the kernels compute for networks in `dtype` on `device`.

    exact: the engine that they are proven against. obstacle: why the networks of this run cannot be
    left to them, where that is so. Raises SettingError for `native` where they cannot run; `auto`
    then stays with torch and says why. Kernels that are proven are taken without a timing: what a
    run computes must not depend on how busy the machine was.
    """
    chosen = _weigh(setting, device, exact, dtype, obstacle)
    if setting == NAME and not chosen.native:
        raise SettingError("compute.engine", setting, "auto or torch here", chosen.reason)
    return chosen


def _weigh(
    setting: str, device: torch.device, exact: Engine, dtype: torch.dtype, obstacle: str
) -> Choice:
    if setting not in ("auto", NAME):
        return Choice(False, f"plain torch (compute.engine={setting})")
    if device.type != "cpu" or dtype != torch.float32:
        return Choice(
            False,
            f"plain torch (native kernels are for float32 on a CPU, not {dtype} on {device.type})",
        )
    if obstacle:
        return Choice(False, f"plain torch, slower: no native kernels, {obstacle}", fallback=True)
    try:
        prove(exact)  # type: ignore[arg-type]
    except NativeError as error:
        return Choice(False, f"plain torch, slower: no native kernels, {error}", fallback=True)
    return Choice(True, f"native, {kernels().words}", sha256=kernels().sha256, name=NAME)
