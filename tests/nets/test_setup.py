"""How work is laid out on a device: as much at once as suits it, every tensor within its bound."""

from dataclasses import replace

import pytest
import torch

from esper_soa.config.env import AttributionConfig
from esper_soa.config.nets import TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.nets import setup as layouts
from esper_soa.nets.data.datasets import sample_spec
from esper_soa.nets.model.host import activation_elements
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.nets.setup import choose_env_chunk, choose_eval_batch
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import make_setup

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def layout_of(cfg: TrainConfig, device: torch.device) -> tuple[int, int, int, torch.dtype]:
    setup = make_setup(cfg, device)
    return setup.env_chunk, setup.eval_batch, setup.workers, setup.precision


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


def test_large_modules_of_users_are_trained_env_by_env_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts, "usable_cores", lambda: 2)

    def layout(host: str, batch_size: int, chunk: int = 0) -> tuple[int, int]:
        cfg = TrainConfig(envs=6, slots=["r0c1"], compute=ComputeConfig(env_chunk=chunk))
        task = TaskConfig(host=f"hosts_of_users:{host}")
        many = replace(cfg, task=task, batch_size=batch_size, train_samples=batch_size)
        return layout_of(many, CPU)[:2]

    monkeypatch.setattr(layouts, "ENV_PRODUCTS", 2**24)
    assert layout("staged", 256) == (1, 128)  # 84,580 multiplications an image
    assert layout("staged", 128) == (3, 16)
    assert layout("refined", 256) == (2, 16)
    assert layout("staged", 256, 3) == (3, 16)


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


def test_the_layout_bounds_the_largest_tensor_of_training_and_of_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts, "MOST_INDEXED", 2**21)
    monkeypatch.setattr(layouts, "usable_cores", lambda: 2)
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
        found = layout_of(many, torch.device("meta"))
        chunk = 2**21 // largest
        assert found == (chunk, 2**21 // (chunk * seen), 1, torch.float32)
    many = replace(alone, envs=999, batch_size=64, train_samples=64, compute=ComputeConfig())
    large = layout_of(many, torch.device("meta"))
    assert large[:2] == (2**21 // (64 * one), 2**21 // (2**21 // (64 * one) * rows))
    # 9 envs of at most 128 are 2 chunks, so that no third thread has work
    assert layout_of(cfg, CPU) == (5, 16, 2, torch.float32)
