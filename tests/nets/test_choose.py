"""Which engine a run gets, and that the engines of two runs in one process know nothing of each
other.
"""

import hashlib
from dataclasses import replace

import pytest
import torch

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.nets import TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.nets.choose import ENGINES, choose_engine, fastest_engine
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.engine import Engine, EngineChoice
from esper_soa.nets.engines.cpu import library
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from tests.builders.tiny_world import CPU, quiet_progress, tiny_settings

STEPS = 6
SINGLE_PROCESS = "native kernels are for float32 on a CPU, not"


def engine(device: torch.device = CPU, **compute: str) -> Engine:
    cfg = TrainConfig(slots=["r0c0"], compute=ComputeConfig(**compute))
    return choose_engine(make_setup(cfg, device), synthetic)


@pytest.mark.usefixtures("native")
def test_whole_networks_go_to_the_kernels_in_c() -> None:
    whole = engine()
    assert isinstance(whole, CpuEngine)
    assert whole.chosen[:3] == (True, "native, compiled for this CPU", False)
    assert whole.chosen.facts() == {
        "engine": "native",
        "tried": "",
        "kind": "native, compiled for this CPU",
        "sha256": hashlib.sha256(library.build().read_bytes()).hexdigest(),
    }


@pytest.mark.parametrize(
    ("compute", "device", "reason"),
    [
        ({"engine": "torch"}, "cpu", "compute.engine=torch"),
        ({"precision": "bfloat16"}, "cpu", f"{SINGLE_PROCESS} torch.bfloat16 on cpu"),
        ({}, "meta", f"{SINGLE_PROCESS} torch.float32 on meta"),
    ],
)
def test_the_rest_is_torch_and_says_why(compute: dict[str, str], device: str, reason: str) -> None:
    plain = engine(torch.device(device), **compute)
    assert isinstance(plain, TorchEngine)
    assert plain.chosen.reason == f"plain torch ({reason})"
    assert not plain.chosen.fallback


@pytest.mark.parametrize(
    ("device", "engine_name", "precision", "why"),
    [
        ("cpu", "triton_graphs", "auto", "CUDA graphs need an NVIDIA GPU, not cpu"),
        ("cpu", "native", "bfloat16", f"Plain torch ({SINGLE_PROCESS} torch.bfloat16 on cpu)"),
        ("meta", "native", "auto", f"Plain torch ({SINGLE_PROCESS} torch.float32 on meta)"),
        ("cuda", "native", "float32", f"Plain torch ({SINGLE_PROCESS} torch.float32 on cuda)"),
    ],
)
def test_what_cannot_run_is_refused_by_its_setting(
    device: str, engine_name: str, precision: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SettingError) as refused:
        engine(torch.device(device), engine=engine_name, precision=precision)
    told = f"compute.engine={engine_name}: must be auto or torch here. {why}."
    assert str(refused.value) == told


@pytest.mark.parametrize("name", ["native", "triton"])
def test_samples_and_optimizers_that_the_kernels_lack_are_named(name: str) -> None:
    given = make_setup(TrainConfig(slots=["r0c0"]), CPU)
    adamw = replace(given.task, optimizer="adamw")
    plots = given.spec._replace(cuts=frozenset(), name="plots")
    several = given.spec._replace(num_targets=2)
    cases = [
        (given._replace(spec=plots), "cut crops of images, not of plots"),
        (given._replace(spec=several), "take one label per sample, not the 2 of images"),
    ]
    if name == "triton":
        cases.append((given._replace(task=adamw), "have sgd, not task.optimizer=adamw"))
    for setup, lack in cases:
        why = f"the kernels {lack}"
        before = "plain torch, slower: no native kernels, " if name == "native" else ""
        assert ENGINES[name].obstacle(setup, None) == f"{before}{why}"
        assert fastest_engine(setup, synthetic) == EngineChoice(
            False, f"plain torch: {why}", name="torch"
        )


# --- two at once


def begun(engine: str) -> EpisodeRunner:
    """An episode in which seeds grow at random."""
    given = {"task": TaskConfig(), "slots": ["r0c0", "r1c1"], "train_samples": 4}
    given["compute"] = ComputeConfig(workers=1, engine=engine)
    world = build_world(replace(tiny_settings(3, 2, STEPS), **given), CPU)
    return EpisodeRunner(world, Player(RandomPolicy(), None), Round(0, quiet_progress()))


@pytest.mark.usefixtures("native")
def test_two_worlds_with_different_engines_take_turns_and_each_is_what_it_is_alone() -> None:
    alone = [begun(engine) for engine in ("native", "torch")]
    for single in alone:
        for _ in range(STEPS):
            single.step_()
    together = [begun(engine) for engine in ("native", "torch")]
    for _ in range(STEPS):
        for played in together:
            played.step_()
    for played, single in zip(together, alone, strict=True):
        weights = single.env.world.weights
        for path, rows in played.env.world.weights.items(include_nested=True, leaves_only=True):
            assert torch.equal(rows, weights[path]), path
        assert torch.equal(played.env.state.signals.val_loss, single.env.state.signals.val_loss)
        assert single.env.state.totals.germinated.sum() > 0
    native, plain = (single.env.world.weights["host", "params"] for single in alone)
    assert not torch.equal(native, plain)  # the engines differ
