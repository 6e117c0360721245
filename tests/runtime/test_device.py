"""From settings to a device and a layout of the work."""

import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from esper_soa.config.env import AttributionConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.nets.data.datasets import sample_spec
from esper_soa.nets.model.host import activation_elements
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.runtime import device as runtime_device
from esper_soa.runtime.device import (
    apply_threads,
    choose_env_chunk,
    choose_eval_batch,
    choose_layout,
    choose_workers,
    device_name,
    keep_freed_memory,
    layout_in_words,
    resolve_device,
    take_device,
    threads,
)
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import SettingError

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_auto_takes_a_gpu_where_there_is_one_and_cpu_is_always_there() -> None:
    assert resolve_device("auto") == (GPU if GPUS else CPU)
    assert resolve_device("cpu") == CPU
    assert device_name(CPU).startswith("cpu (")


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("setting", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_without_cuda_is_refused_with_the_reason(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (
        "The installed torch is a CPU build; install a CUDA build of torch.",
        "torch finds no usable NVIDIA GPU or driver.",
    )
    for reason, cuda in zip(reasons, (None, "12.6"), strict=True):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(SettingError) as caught:
            resolve_device(setting)
        assert str(caught.value) == f"device={setting}: must be auto or cpu here. {reason}"


def test_cuda_gets_its_index_and_a_missing_index_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    asked = [("auto", 0), ("auto", 2), ("cuda", 0), ("cuda", 2), ("cuda:1", 2)]
    found = [str(resolve_device(setting, place)) for setting, place in asked]
    assert found == ["cuda:0", "cuda:2", "cuda:0", "cuda:2", "cuda:1"]
    assert resolve_device("cpu", 2) == CPU
    with pytest.raises(SettingError) as caught:
        resolve_device("cuda:3")
    told = "device=cuda:3: must be below cuda:3. This machine shows 3 CUDA device(s)."
    assert str(caught.value) == told


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:x", "tpu:0"])
def test_an_unknown_device_is_refused(setting: str) -> None:
    with pytest.raises(
        SettingError, match=rf"^device={setting}: must be auto, cpu, cuda or cuda:<index>\.$"
    ):
        resolve_device(setting)


@pytest.mark.parametrize(
    ("setting", "envs", "batch_size", "device", "cores", "chunk"),
    # 2 cores: 9 envs of at most 4 are 3 chunks, of equal shares 4: 3 + 2 + 2 + 2; 6 are 3 + 3; 1
    # env stays alone. Small batches make large chunks, and every core has one.
    [
        (0, 9, 128, CPU, 2, 3),
        (0, 6, 128, CPU, 2, 3),
        (0, 16, 128, CPU, 2, 4),
        (0, 3, 128, CPU, 2, 2),
        (0, 1, 128, CPU, 2, 1),
        (0, 9, 128, GPU, 2, 9),
        (2, 9, 128, CPU, 2, 2),
        (2, 9, 128, GPU, 2, 2),
        (16, 9, 128, CPU, 2, 9),
        (0, 64, 32, CPU, 2, 16),
        (0, 64, 125, CPU, 2, 4),
        (0, 64, 5000, CPU, 2, 1),
        (0, 64, 1, CPU, 2, 32),
        (0, 16, 128, CPU, 16, 1),
        (0, 16, 128, CPU, 8, 2),
    ],
)
def test_the_chunk_of_envs_suits_the_device_and_never_exceeds_the_envs(
    setting: int, envs: int, batch_size: int, device: torch.device, cores: int, chunk: int
) -> None:
    assert choose_env_chunk(setting, envs, batch_size, device, cores=cores) == chunk


@pytest.mark.parametrize(
    ("setting", "chunks", "device", "workers"),
    [
        (0, 4, CPU, 2),
        (0, 1, CPU, 1),
        (3, 8, CPU, 3),
        (3, 2, CPU, 2),
        (0, 4, GPU, 1),
        (1, 4, GPU, 1),
    ],
)
def test_workers_are_as_many_as_cores_but_no_more_than_chunks(
    setting: int, chunks: int, device: torch.device, workers: int
) -> None:
    assert choose_workers(setting, chunks, device, cores=2) == workers


def test_a_gpu_takes_no_second_worker() -> None:
    with pytest.raises(
        SettingError,
        match=(
            r"^compute\.workers=2: must be 0 or 1 on cuda\. Workers share the CPU's "
            r"cores\.$"
        ),
    ):
        choose_workers(2, 4, GPU)


def test_more_threads_than_make_sense_are_refused() -> None:
    most = 4 * usable_cores()
    told = f"={most + 1}: must be at most {most} here. That is 4 per usable core."
    with pytest.raises(SettingError, match=f"compute.workers{told}"):
        choose_workers(most + 1, 10_000, CPU)
    with pytest.raises(SettingError, match=f"compute.threads{told}"):
        apply_threads(most + 1)
    assert choose_workers(most, 10_000, CPU) == most


def test_one_operation_has_one_thread_or_as_many_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        assert apply_threads(3) == 3
        assert torch.get_num_threads() == 3
        assert apply_threads(0) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("said", ["", "active"])
def test_a_command_has_threads_sleep_unless_the_user_says_otherwise(said: str) -> None:
    """As torch is loaded with it: what has no torch yet is an interpreter of its own."""
    code = (
        "import os; from esper_soa.system.signals import torch_import_guard\n"
        "with torch_import_guard(): print(os.environ['OMP_WAIT_POLICY'])"
    )
    own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    own |= {"OMP_WAIT_POLICY": said} if said else {}
    told = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert told.stdout == f"{said or 'passive'}\n"


@pytest.mark.parametrize(
    ("device", "workers", "chunk", "words"),
    [
        (CPU, 2, 3, "2 workers, each of one thread, train 3 envs at a time (5 usable cores), "),
        (CPU, 1, 1, "1 worker trains 1 env at a time (5 usable cores), "),
        (GPU, 1, 3, "trains 3 envs at a time, one such chunk after the other"),
    ],
)
def test_the_log_says_how_the_envs_are_shared_out(
    device: torch.device, workers: int, chunk: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_device, "usable_cores", lambda: 5)
    threads_text = "1 thread for policy and env state" if device == CPU else ""
    assert layout_in_words(device, workers, chunk) == words + threads_text


@pytest.mark.parametrize("kind", ["cuda", "meta"])
def test_no_tensor_of_a_gpu_gets_more_elements_than_its_kernels_index(kind: str) -> None:
    device = torch.device(kind)

    def chunk(setting: int, batch_size: int = 32, envs: int = 2**18) -> int:
        elements = batch_size * 8192
        return choose_env_chunk(setting, envs, batch_size, device, elements=elements)

    assert chunk(0) == chunk(8191) == 8191  # (2^31 - 1) / 2^18
    assert chunk(8192, envs=100) == 100, "of which no more are together than there are"
    bound = f"A tensor of {kind} has at most 2147483647 elements."
    told = f"^compute.env_chunk=8192: must be at most 8191 here. {bound}"
    with pytest.raises(SettingError, match=told):
        chunk(8192)
    told = f"^batch_size=1000000: must be at most 262143 with these hosts. {bound}"
    with pytest.raises(SettingError, match=told):
        chunk(0, 1_000_000, 1)
    found = [choose_eval_batch(device, elements=2**power) for power in (28, 20, 31)]
    assert found == [7, 256, 1]
    assert choose_env_chunk(2**18, 2**18, 32, CPU, elements=2**31) == 2**18


def test_the_device_of_a_run_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_device(torch.device("cuda", 1))
    take_device(CPU)
    assert taken == [torch.device("cuda", 1)]


def test_the_layout_bounds_the_largest_tensor_of_training_and_of_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_device, "MOST_INDEXED", 2**21)
    monkeypatch.setattr(runtime_device, "usable_cores", lambda: 2)
    slots = ["r0c0", "r0c1", "r0c2", "r1c0", "r1c1"]
    cfg = TrainConfig(envs=9, slots=slots, batch_size=2, compute=ComputeConfig(workers=4))
    alone, sampled = (
        replace(cfg, attribution=AttributionConfig(pairs=False, shapley_samples=samples))
        for samples in (0, 12)
    )
    shape = task_shape(cfg.task, cfg.slots)
    inputs = sample_spec(cfg.data).elements
    one, rows, more = (activation_elements(shape, inputs, count) for count in (1, 16, 32))
    assert 2 * one < rows < more < 64 * one
    for asked, largest, seen in ((alone, rows, rows), (sampled, more, more)):
        many = replace(asked, envs=999, compute=ComputeConfig())
        layout = choose_layout(many, shape, torch.device("meta"))
        chunk = 2**21 // largest
        assert layout == (chunk, 2**21 // (chunk * seen), 1, torch.float32)
    many = replace(alone, envs=999, batch_size=64, train_samples=64, compute=ComputeConfig())
    large = choose_layout(many, shape, torch.device("meta"))
    assert large[:2] == (2**21 // (64 * one), 2**21 // (2**21 // (64 * one) * rows))
    # 9 envs of at most 128 are 2 chunks, so that no third thread has work
    assert choose_layout(cfg, shape, CPU) == (5, 16, 2, torch.float32)


def test_a_device_is_named_with_workers_threads_and_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with threads(2):
        assert device_name(CPU, 1, torch.bfloat16).endswith(", 1 worker, 2 threads, bfloat16)")
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "riscv")
    assert device_name(CPU, 3) == "cpu (riscv, 3 workers, 1 thread, float32)"
    monkeypatch.setattr(platform, "processor", lambda: "Vector 1")
    assert device_name(CPU, 3) == "cpu (Vector 1, 3 workers, 1 thread, float32)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H{device.index}")
    assert device_name(torch.device("cuda", 2)) == "cuda:2 (H2, float32)"


def test_freed_memory_is_kept_where_glibc_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    obeys = True

    class Library:
        """The C library of this process."""

        @staticmethod
        def mallopt(option: int, value: int) -> int:
            told.append((option, value))
            return int(obeys)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert keep_freed_memory(CPU)
    # M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h
    assert told == [(-4, 0), (-1, 2**31 - 1), (-8, 1)]
    obeys = False
    assert not keep_freed_memory(CPU)
    del told[:]
    assert not keep_freed_memory(GPU)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory(CPU)
    assert told == []
