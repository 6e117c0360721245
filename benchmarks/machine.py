"""What a timing was taken on: the machine in words, what it can do at most, how busy it was,
memory and waits.

Linux tells most of it under /proc; elsewhere those entries are None.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.sync_guard import Sync, SyncGuard
from esper_soa.system.cores import usable_cores

# load average, and cores in use by others, above which a machine is not called quiet
QUIET_LOAD = 0.3
MIB = 2**20
ROOT = Path(__file__).parents[1]
SOURCES = ("esper_soa", "configs", "benchmarks")
SUFFIXES = (".py", ".c", ".h", ".yaml")


def describe(device: torch.device) -> dict[str, object]:
    """Processor, cores, accelerator and versions."""
    found: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found |= {"triton": metadata.version("triton")}
    return found


def git_commit(root: Path = ROOT) -> str:
    """The commit of a checkout, + where files differ but for results; "unknown" outside git."""
    told = partial(subprocess.run, cwd=root, capture_output=True, text=True)
    try:
        head = told(["git", "rev-parse", "--short", "HEAD"])
        changed = told(["git", "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"])
    except OSError:
        return "unknown"
    mark = "+" if changed.stdout.strip() else ""
    return head.stdout.strip() + mark if head.returncode == 0 else "unknown"


def sources_digest(root: Path = ROOT) -> str:
    """What the code says, with git or without: a digest of all that computes or measures."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def everyones_seconds() -> float | None:
    """Processor time of all processes of the machine so far."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(number) for number in first[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # not idle, not iowait


def load() -> float | None:
    """Load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def limits(device: torch.device) -> dict[str, float]:
    """Measured GFLOP/s of a float32 product and GB/s (read and written) of a copy, all cores."""
    torch.set_num_threads(usable_cores())
    size, numbers = (8192, 2**28) if device.type == "cuda" else (1536, 2**25)
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    source = torch.zeros(numbers, device=device)
    target = torch.ones(numbers, device=device)
    products = [lambda: torch.mm(a, b)]
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        # oneDNN takes the widest vectors of any processor, torch.mm of those of Intel alone
        products.append(lambda: torch.nn.functional.linear(a.to_mkldnn(), b).to_dense())
    product = min(_fastest(action, device) for action in products)
    copied = _fastest(lambda: target.copy_(source), device)
    return {"gflops": 2 * size**3 / product / 1e9, "gb_per_second": 8 * numbers / copied / 1e9}


def _fastest(action: Callable[[], Tensor], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        wait_for(device)
        begun = time.perf_counter()
        action()
        wait_for(device)
        times.append(time.perf_counter() - begun)
    return min(times)


def wait_for(device: torch.device) -> None:
    """On CUDA, wait until everything asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SyncCount(SyncGuard):
    """Counts what the host would wait for, anywhere, but for uploads from pinned memory."""

    moves = False

    def note(self, function: str, operation: str) -> None:
        """Log it; nothing is forbidden here."""
        self.log.append(Sync(function, operation))


def count_syncs(action: Callable[[], object], device: torch.device) -> int:
    """Waits for the device within `action`: on CUDA what torch warns of; on a CPU what would be
    waited for on a GPU, in the calling thread and in code that is not compiled.
    """
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)
    with SyncCount() as count:
        action()
    return len(count.log)


def forget_peak(device: torch.device) -> int:
    """Have `peak` count from here on. Bytes in use: of tensors on CUDA, of the process on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # glibc gives back to the system what torch has freed and it keeps
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    """Most bytes in use since `forget_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident("VmHWM")


def resident(kind: str) -> int:
    """Bytes of this process in memory, now or at most; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
