"""The device that the settings stand for, its threads and memory, and both in words."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from esper_soa.nets.setup import check_threads
from esper_soa.system.cores import FORKED_WITH_TORCH, usable_cores
from esper_soa.system.errors import SettingError, check

# glibc's M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX: no mappings, no trimming, one heap for all
# threads (those of other threads are trimmed whatever the second says).
MALLOPT_KEEP = ((-4, 0), (-1, 2**31 - 1), (-8, 1))


def resolve_device(setting: str, place: int = 0) -> torch.device:
    """The device that `setting` (auto, cpu, cuda, cuda:<index>) stands for, with an index on CUDA.

    place: index of the GPU where the setting leaves it open. Raises SettingError where CUDA or the
    GPU is not there; only `auto` falls back to the CPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and count == 0):
        return torch.device("cpu")
    if setting == "auto":
        return torch.device("cuda", place)
    kind, _, index = setting.partition(":")
    if kind != "cuda" or not (index.isdigit() or setting == "cuda"):
        raise SettingError("device", setting, "auto, cpu, cuda or cuda:<index>")
    if count == 0:
        reason = "torch finds no usable NVIDIA GPU or driver."
        if torch.version.cuda is None:
            reason = "The installed torch is a CPU build; install a CUDA build of torch."
        raise SettingError("device", setting, "auto or cpu here", remedy=reason)
    device_text = f"This machine shows {count} CUDA device(s)."
    check(
        int(index or 0) < count,
        "device",
        setting,
        allowed=f"below cuda:{count}",
        remedy=device_text,
    )
    return torch.device("cuda", int(index or place))


def take_device(device: torch.device) -> None:
    """Have `device` be the current one: captures, events and Triton's launches work on that."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def apply_threads(setting: int) -> int:
    """Give torch operations outside the workers `setting` CPU threads (0 = one), and return those.

    One, because the operations of policy and state are small, and threads inside an operation wait
    for each other: one that lost its core to another process holds all of them up, and while idle
    they keep cores from the workers. Raises SettingError for more than THREADS_PER_CORE per core,
    and for more than one in a forked process, where they would wait for those of its parent.
    """
    check_threads("compute.threads", setting)
    remedy = "Start it by spawn, as by multiprocessing.get_context('spawn') or context='spawn'."
    allowed = "1 in a process that was forked from one with torch"
    can = setting <= 1 or not FORKED_WITH_TORCH.is_set()
    check(can, "compute.threads", setting, allowed=allowed, remedy=remedy)
    torch.set_num_threads(setting or 1)
    return torch.get_num_threads()


@contextmanager
def threads(setting: int) -> Iterator[None]:
    """`apply_threads` in the context; what the caller had is in force again behind it."""
    before = torch.get_num_threads()
    try:
        apply_threads(setting)
        yield
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device, workers: int = 1, dtype: torch.dtype = torch.float32) -> str:
    """The device in words, for logs, versions.json and the table; `dtype`: of the hosts."""
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)}, {precision})"
    resources = f"{_some(workers, 'worker')}, {_some(torch.get_num_threads(), 'thread')}"
    return f"{device} ({platform.processor() or platform.machine()}, {resources}, {precision})"


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def layout_in_words(device: torch.device, workers: int, env_chunk: int) -> str:
    """How the work on the envs is shared out, and why, for the log."""
    if device.type != "cpu":
        return f"trains {env_chunk} envs at a time, one such chunk after the other"
    thread_text = f"{_some(torch.get_num_threads(), 'thread')} for policy and env state"
    many = f"{workers} workers, each of one thread, train"
    work = f"{'1 worker trains' if workers == 1 else many} {_some(env_chunk, 'env')} at a time"
    return f"{work} ({usable_cores()} usable cores), {thread_text}"


def keep_freed_memory(device: torch.device) -> bool:
    """Let glibc, where it is, keep what torch frees on a CPU; True where it obeys.

    By default it maps and unmaps every activation, a few MB each, and the page faults cost a fifth
    of a training step with seeds.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in MALLOPT_KEEP)
