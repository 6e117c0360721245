"""Which engine a run gets, and that the engines of two runs in one process know nothing of each
other.
"""

import hashlib
from dataclasses import replace

import pytest
import torch
from tiny_world import CPU, quiet_progress, tiny_settings

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.errors import SettingError
from esper_soa.config.nets import TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.engine import Engine
from esper_soa.nets.engines.cpu import library
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.training.build import build_world, trial_of
from esper_soa.training.collect import EpisodeRunner, Player, Round

STEPS = 6
ALONE = "native kernels are for float32 on a CPU, not"


def engine(device: torch.device = CPU, **compute: str) -> Engine:
    cfg = TrainConfig(slots=["r0c0"], compute=ComputeConfig(**compute))
    return choose_engine(cfg.compute.engine, trial_of(cfg, device))


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
        ({"precision": "bfloat16"}, "cpu", f"{ALONE} torch.bfloat16 on cpu"),
        ({}, "meta", f"{ALONE} torch.float32 on meta"),
    ],
)
def test_the_rest_is_torch_and_says_why(compute: dict[str, str], device: str, reason: str) -> None:
    plain = engine(torch.device(device), **compute)
    assert isinstance(plain, TorchEngine)
    assert plain.chosen.reason == f"plain torch ({reason})"
    assert not plain.chosen.fallback


@pytest.mark.parametrize(
    ("device", "setting"),
    [
        ("cpu", {"engine": "triton_graphs"}),
        ("cpu", {"engine": "native", "precision": "bfloat16"}),
        ("meta", {"engine": "native"}),
        ("cuda", {"engine": "native"}),
    ],
)
def test_what_cannot_run_is_refused_by_its_setting(device: str, setting: dict[str, str]) -> None:
    why = f"compute.engine={setting['engine']}: must be auto or torch here"
    with pytest.raises(SettingError, match=why):
        engine(torch.device(device), **setting)


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
