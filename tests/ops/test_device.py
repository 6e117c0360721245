"""From settings to a device and a layout of the work."""

import pytest
import torch

from esper_soa.errors import SettingError
from esper_soa.ops.device import apply_threads, choose_env_chunk, device_name, resolve_device

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_cpu_is_always_there() -> None:
    assert resolve_device("cpu") == CPU


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    assert resolve_device("auto") == (GPU if GPUS else CPU)


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("setting", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_without_cuda_is_refused_with_the_reason(setting: str) -> None:
    with pytest.raises(SettingError, match=rf"device={setting}: must be auto or cpu here\. .*torch"):
        resolve_device(setting)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_cuda_gets_its_index_and_a_missing_index_is_refused() -> None:
    assert resolve_device("cuda") == GPU
    with pytest.raises(SettingError, match=f"device=cuda:{GPUS}: must be below cuda:{GPUS}"):
        resolve_device(f"cuda:{GPUS}")


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:x", "tpu:0"])
def test_an_unknown_device_is_refused(setting: str) -> None:
    with pytest.raises(SettingError, match=f"device={setting}: must be auto, cpu, cuda"):
        resolve_device(setting)


@pytest.mark.parametrize(
    ("setting", "envs", "device", "chunk"),
    [(0, 9, CPU, 4), (0, 3, CPU, 3), (0, 9, GPU, 9), (2, 9, CPU, 2), (2, 9, GPU, 2), (16, 9, CPU, 9)],
)
def test_the_chunk_of_envs_suits_the_device_and_never_exceeds_the_envs(
    setting: int, envs: int, device: torch.device, chunk: int
) -> None:
    assert choose_env_chunk(setting, envs, device) == chunk


def test_threads_are_left_alone_or_set() -> None:
    before = torch.get_num_threads()
    try:
        assert apply_threads(0) == before
        assert apply_threads(3) == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_device_has_a_name_in_words() -> None:
    assert device_name(CPU).startswith("cpu (")
