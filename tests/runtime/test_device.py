"""From settings to a device and a layout of the work."""

import torch

from esper_soa.runtime.device import (
    device_name,
    resolve_device,
)

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_auto_takes_a_gpu_where_there_is_one_and_cpu_is_always_there() -> None:
    assert resolve_device("auto") == (GPU if GPUS else CPU)
    assert resolve_device("cpu") == CPU
    assert device_name(CPU).startswith("cpu (")
