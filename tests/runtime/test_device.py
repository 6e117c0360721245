"""From settings to a device and a layout of the work."""

import platform
import resource

import pytest
import torch

from esper_soa.runtime.device import device_name, keep_freed_memory, resolve_device

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_auto_takes_a_gpu_where_there_is_one_and_cpu_is_always_there() -> None:
    assert resolve_device("auto") == (GPU if GPUS else CPU)
    assert resolve_device("cpu") == CPU
    assert device_name(CPU).startswith("cpu (")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_torch_frees_stays_with_the_process() -> None:
    assert keep_freed_memory(torch.device("cpu"))
    assert not keep_freed_memory(torch.device("meta"))
    faults = []
    for _ in range(5):
        torch.ones(2**22)  # 4096 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert faults[-1] - faults[0] < 1000
