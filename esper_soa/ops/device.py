"""From the settings `device` and `compute` to a torch device and a layout of the work on it.

Called once by the trainer before anything is built.
"""

import ctypes
import platform

import torch

from esper_soa.errors import SettingError

CPU_ENV_CHUNK = 4  # envs whose weights and activations stay in the caches of a CPU core together
CPU_EVAL_BATCH = 16
GPU_EVAL_BATCH = 256
MALLOPT_KEEP = ((-4, 0), (-1, 2**31 - 1))  # glibc's M_MMAP_MAX and M_TRIM_THRESHOLD: no mappings, no trimming


def resolve_device(setting: str) -> torch.device:
    """The device that `setting` (auto, cpu, cuda, cuda:<index>) stands for, always with an index on CUDA.

    Raises SettingError where CUDA or the GPU is not there; only `auto` falls back to the CPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and count == 0):
        return torch.device("cpu")
    if setting == "auto":
        return torch.device("cuda", 0)
    kind, _, index = setting.partition(":")
    if kind != "cuda" or not (index.isdigit() or setting == "cuda"):
        raise SettingError("device", setting, "auto, cpu, cuda or cuda:<index>")
    if count == 0:
        raise SettingError("device", setting, "auto or cpu here", _why_no_cuda())
    if int(index or 0) >= count:
        raise SettingError("device", setting, f"below cuda:{count}", f"This machine shows {count} CUDA device(s).")
    return torch.device("cuda", int(index or 0))


def choose_env_chunk(setting: int, envs: int, device: torch.device) -> int:
    """Envs that are trained together: the setting, or for 0 what suits the device; never more than there are."""
    if setting > 0:
        return min(setting, envs)
    return min(CPU_ENV_CHUNK, envs) if device.type == "cpu" else envs


def apply_threads(setting: int) -> int:
    """Give one torch operation `setting` CPU threads (0 = leave); returns the number in force."""
    if setting > 0:
        torch.set_num_threads(setting)
    return torch.get_num_threads()


def device_name(device: torch.device) -> str:
    """The device in words, for logs, versions.json and the table."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "The installed torch is a CPU build; install a CUDA build of torch."
    return "torch finds no usable NVIDIA GPU or driver."


def choose_eval_batch(device: torch.device) -> int:
    """Validation images per forward pass: few on a CPU, where caches decide and alpha rows multiply them."""
    return CPU_EVAL_BATCH if device.type == "cpu" else GPU_EVAL_BATCH


def keep_freed_memory(device: torch.device) -> bool:
    """Let the C library keep what torch frees on a CPU instead of returning it to the system; True where it obeys.

    Activations are a few MB each; by default glibc maps and unmaps every one of them, and the page faults cost a fifth
    of a training step with seeds. Has no effect on results. Only glibc offers it; elsewhere nothing happens.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in MALLOPT_KEEP)
