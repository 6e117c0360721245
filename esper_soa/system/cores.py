"""The processor of this machine: its identity, its instruction sets, the cores that are usable, and
how threads of torch's operations wait for each other on it.

Needs no torch, as a wheel is built with it.
"""

import hashlib
import os
import platform
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")  # file of Linux
CGROUPS = Path("/sys/fs/cgroup")  # control groups of Linux, of version 2
OWN_CGROUP = Path("/proc/self/cgroup")
# Fields that compilers look at for code for the machine that they run on. x86-64 has flags and a
# model name, arm64 has the others.
IDENTIFYING_FIELDS = ("flags", "model name", "Features", "CPU implementer", "CPU part")

# Variable that OpenMP reads as torch is loaded: whether threads of an operation sleep while they
# wait. Those that do not take cores from other work, and where that has a core, ten times as long.
WAIT_POLICY = "OMP_WAIT_POLICY"


class Processor(NamedTuple):
    """Facts of a processor; outside Linux its machine alone."""

    machine: str  # platform.machine(): x86_64, aarch64, ...
    features: frozenset[str]  # names of Linux: avx2, asimd, ...
    kind: str  # the same for processors that the same code is best for; "" where nothing is known


def processor_of(machine: str, cpuinfo: str) -> Processor:
    """The processor that the text of /proc/cpuinfo describes."""
    lines = sorted({line for line in cpuinfo.splitlines() if line.startswith(IDENTIFYING_FIELDS)})
    listed = [line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))]
    kind = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""
    return Processor(machine, frozenset(" ".join(listed).split()), kind)


def this_processor() -> Processor:
    """The processor of this machine."""
    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:
        cpuinfo = ""
    return processor_of(platform.machine(), cpuinfo)


def let_threads_sleep() -> None:
    """Have threads of operations sleep while they wait, unless torch is there or the user has said
    otherwise; for commands, before they import torch.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(WAIT_POLICY, "passive")


# Whether this process was forked from one that had torch: it lacks the threads of torch's
# operations, and what is shared out among them waits for ever.
FORKED_WITH_TORCH = threading.Event()


def _note_fork() -> None:
    if "torch" in sys.modules:
        FORKED_WITH_TORCH.set()


os.register_at_fork(after_in_child=_note_fork)


def core_numbers() -> list[int]:
    """Numbers of the CPU cores that this process may use, at least one."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many these are, or fewer where a container gives this process and the ranks beside it no
    more time.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # that torch's launcher has started
    return min(len(core_numbers()), max(1, core_limit(CGROUPS, OWN_CGROUP) // ranks))


def core_limit(mount: Path, membership: Path) -> int:
    """Cores that the time of this process is worth, by cpu.max of its control groups (version 2),
    rounded up; sys.maxsize without a limit.

    mount: where the groups are; membership: the file with the path of this process's group.
    """
    limit = sys.maxsize
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return limit
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # the root has no such file, an old system another
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                limit = min(limit, max(1, -(-int(quota) // int(period))))
    return limit
