"""Which engine a run gets, and that the engines of two runs in one process know nothing of each
other.
"""

import hashlib
import io
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from tiny_world import CPU, tiny_settings

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.build import build_world
from esper_soa.config import ComputeConfig
from esper_soa.env.world import World
from esper_soa.errors import SettingError
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.config import TaskConfig, enabled_slots
from esper_soa.nets.engine import Engine
from esper_soa.nets.engines.cpu import library
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.host import host_shape
from esper_soa.nets.layers import Layers
from esper_soa.ops.collect import Episode, Player, Round
from esper_soa.ops.progress import Progress

WIDE = TaskConfig()  # 8, 16 and 32 channels
NARROW = TaskConfig(name="narrow", base_channels=4, num_blocks=2, num_pools=2)
STEPS = 6


def engine(task: TaskConfig, device: torch.device = CPU, **compute: str) -> Engine:
    return choose_engine(
        ComputeConfig(**compute), device, task, host_shape(task, enabled_slots(task, ["r0c0"]))
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("task", [WIDE, NARROW], ids=["wide", "narrow"])
def test_whole_networks_go_to_the_kernels_in_c(task: TaskConfig) -> None:
    whole = engine(task)
    assert isinstance(whole, CpuEngine)
    assert whole.chosen[:3] == (True, "native, compiled for this CPU", False)
    assert whole.chosen.facts() == {
        "engine": "native",
        "tried": "",
        "kind": "native, compiled for this CPU",
        "sha256": hashlib.sha256(library.build().read_bytes()).hexdigest(),
    }


@pytest.mark.parametrize("task", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("compute", "device", "reason"),
    [
        ({"engine": "torch"}, "cpu", "plain torch (compute.engine=torch)"),
        (
            {"precision": "bfloat16"},
            "cpu",
            "plain torch (native kernels are for float32 on a CPU, not torch.bfloat16 on",
        ),
        (
            {},
            "meta",
            "plain torch (native kernels are for float32 on a CPU, not torch.float32 on meta)",
        ),
    ],
)
def test_all_else_is_plain_torch_and_says_why(
    task: TaskConfig, compute: dict[str, str], device: str, reason: str
) -> None:
    plain = engine(task, torch.device(device), **compute)
    assert isinstance(plain, TorchEngine)
    assert type(plain.layers) is Layers
    assert plain.chosen.reason.startswith(reason)
    assert not plain.chosen.fallback


@pytest.mark.parametrize(
    "setting", [{"engine": "triton_graphs"}, {"engine": "native", "precision": "bfloat16"}]
)
def test_what_cannot_run_is_refused_by_its_setting(setting: dict[str, str]) -> None:
    with pytest.raises(
        SettingError, match=f"compute.engine={setting['engine']}: must be auto or torch here"
    ):
        engine(WIDE, **setting)


# --- two at once


class Played(NamedTuple):
    """A world in the middle of an episode in which seeds grow at random."""

    world: World
    episode: Episode

    def weights(self) -> TensorDict:
        return self.world.weights.clone()


def begun(task: TaskConfig, compute: dict[str, str]) -> Played:
    settings = tiny_settings(3, 2, STEPS)
    settings.task = task
    settings.slots = ["r0c0", "r1c1"]
    settings.train_samples = 4
    settings.compute = ComputeConfig(workers=1, **compute)
    world = build_world(settings, CPU)
    quiet = Progress(3 * STEPS, Console(file=io.StringIO()), "off")
    return Played(world, Episode(world, Player(RandomPolicy(), None), Round(0, quiet)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("task", "one", "other"),
    [
        (WIDE, {"engine": "native"}, {"engine": "torch"}),
        (NARROW, {"engine": "native"}, {"engine": "torch"}),
    ],
    ids=["native", "native layers"],
)
def test_two_worlds_with_different_engines_take_turns_and_each_is_what_it_is_alone(
    task: TaskConfig, one: dict[str, str], other: dict[str, str]
) -> None:
    alone = []
    for compute in (one, other):
        single = begun(task, compute)
        for _ in range(STEPS):
            single.episode.step_()
        alone.append((single.weights(), single.episode.env.state))
    together = [begun(task, compute) for compute in (one, other)]
    for _ in range(STEPS):
        for played in together:
            played.episode.step_()
    for played, (weights, state) in zip(together, alone, strict=True):
        for path, rows in played.weights().items(include_nested=True, leaves_only=True):
            assert torch.equal(rows, weights[path]), path
        assert torch.equal(played.episode.env.state.signals.val_loss, state.signals.val_loss)
        assert state.totals.germinated.sum() > 0
    assert not torch.equal(
        alone[0][0]["host", "params"], alone[1][0]["host", "params"]
    )  # the engines differ
