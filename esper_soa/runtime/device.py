"""From the settings `device` and `compute` to a torch device and a layout of the work on it."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from esper_soa.config.nets import SubsetRows
from esper_soa.config.settings import TrainConfig
from esper_soa.nets.data.datasets import sample_spec
from esper_soa.nets.engine import Sizes
from esper_soa.nets.model.host import MOST_INDEXED, HostShape, activation_elements
from esper_soa.nets.precision import choose_precision
from esper_soa.nets.seeds.subsets import max_rows
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import SettingError, check

# training images of a forward pass on a CPU: fewer cost calls, more fall out of the caches
CPU_CHUNK_IMAGES = 512
CPU_EVAL_BATCH = 16
GPU_EVAL_BATCH = 256
THREADS_PER_CORE = 4  # most that may be asked for: more only wait for each other
# glibc's M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX: no mappings, no trimming, one heap for all
# threads (those of other threads are trimmed whatever the second says).
MALLOPT_KEEP = ((-4, 0), (-1, 2**31 - 1), (-8, 1))


class Layout(NamedTuple):
    """How the networks of a run are laid out on its device: fields of NetsConfig."""

    env_chunk: int  # networks per forward pass
    eval_batch: int  # validation images per forward pass
    workers: int  # threads that share the chunks of envs
    precision: torch.dtype  # of activations


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


def sizes_of(cfg: TrainConfig) -> Sizes:
    """How much work the settings ask of an env-step."""
    return Sizes(cfg.envs, cfg.batch_size, cfg.train_samples, val_samples=cfg.val_samples)


def choose_layout(cfg: TrainConfig, shape: HostShape, device: torch.device) -> Layout:
    """What `cfg.compute` means for these hosts on `device`: as much at once as suits it, with every
    tensor within its bound (nets/model/host.py).

    Raises SettingError for settings that the device cannot follow.
    """
    num_slots = len(shape.slots)
    sampled = tuple(range(cfg.attribution.shapley_samples * num_slots))  # at most as many codes
    rows = max_rows(num_slots, SubsetRows(cfg.attribution.pairs, sampled))
    inputs = sample_spec(cfg.data).elements
    validation_elements = activation_elements(shape, inputs, rows)
    trained = cfg.batch_size * activation_elements(shape, inputs)
    work = cfg.compute.env_chunk, cfg.envs, cfg.batch_size, device
    chunk = choose_env_chunk(*work, elements=max(trained, validation_elements))
    batch = choose_eval_batch(device, elements=chunk * validation_elements)
    workers = choose_workers(cfg.compute.workers, -(-cfg.envs // chunk), device)
    return Layout(
        chunk, batch, workers, precision=choose_precision(cfg.compute.precision, device).dtype
    )


def choose_env_chunk(
    setting: int, envs: int, batch: int, device: torch.device, cores: int = 0, elements: int = 1
) -> int:
    """Envs that are trained together: the setting, or for 0 what suits the device; at most all.

    All on a GPU, as far as no tensor, of which each env has `elements`, gets more than INDEXED of
    them; raises SettingError for a setting beyond that, and where one env has more. On a CPU as
    many as have CPU_CHUNK_IMAGES in their batches, such that `cores` (0 = the usable ones) have
    equal shares. The number of workers plays no part: another one changes no rounding.
    """
    if device.type != "cpu":
        most = MOST_INDEXED // elements
        words = f"A tensor of {device.type} has at most {MOST_INDEXED} elements."
        largest = f"at most {batch * MOST_INDEXED // elements} with these hosts"
        check(most > 0, "batch_size", batch, allowed=largest, remedy=words)
        fits = min(setting, envs) <= most
        check(fits, "compute.env_chunk", setting, allowed=f"at most {most} here", remedy=words)
        return min(setting or envs, envs, most)
    if setting > 0:
        return min(setting, envs)
    cores = cores or usable_cores()
    most = max(1, CPU_CHUNK_IMAGES // batch)
    shares = -(-envs // (most * cores)) * cores
    return -(-envs // min(shares, envs))


def choose_workers(setting: int, chunks: int, device: torch.device, cores: int = 0) -> int:
    """Threads that share chunks of envs: the setting, or for 0 one per usable core of a CPU.

    Never more than there are chunks, and one on a GPU. SettingError for more than make sense.
    """
    _check_threads("compute.workers", setting)
    if device.type != "cpu":
        allowed = f"0 or 1 on {device.type}"
        check(
            setting <= 1,
            "compute.workers",
            setting,
            allowed=allowed,
            remedy="Workers share the CPU's cores.",
        )
        return 1
    return min(setting or cores or usable_cores(), chunks)


def apply_threads(setting: int) -> int:
    """Give torch operations outside the workers `setting` CPU threads (0 = one), and return those.

    One, because the operations of policy and state are small, and threads inside an operation wait
    for each other: one that lost its core to another process holds all of them up, and while idle
    they keep cores from the workers. Raises SettingError for more than THREADS_PER_CORE per core.
    """
    _check_threads("compute.threads", setting)
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


def _check_threads(setting: str, count: int) -> None:
    most = THREADS_PER_CORE * usable_cores()
    remedy = f"That is {THREADS_PER_CORE} per usable core."
    check(count <= most, setting, count, allowed=f"at most {most} here", remedy=remedy)


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


def choose_eval_batch(device: torch.device, elements: int = 1) -> int:
    """Validation images per forward pass: few on a CPU, where caches decide.

    elements: of the largest tensor per image, of all envs that are validated together.
    """
    if device.type != "cpu":
        return max(1, min(GPU_EVAL_BATCH, MOST_INDEXED // elements))
    return CPU_EVAL_BATCH


def keep_freed_memory(device: torch.device) -> bool:
    """Let glibc, where it is, keep what torch frees on a CPU; True where it obeys.

    By default it maps and unmaps every activation, a few MB each, and the page faults cost a fifth
    of a training step with seeds.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in MALLOPT_KEEP)
