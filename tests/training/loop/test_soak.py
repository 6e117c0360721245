"""Memory over many rounds with germinations, prunes, injected faults and rollbacks stays flat."""

import gc
import io
import math
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console

from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import TelemetryConfig, TrainConfig
from esper_soa.env.step import StepData
from esper_soa.env.world import World
from esper_soa.nets.data.datasets import load_images
from esper_soa.nets.engine import Sizes
from esper_soa.runtime.device import keep_freed_memory
from esper_soa.training.loop.build import build_rules
from esper_soa.training.loop.collect import Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.progress import Progress

MIB = 2**20
SETTLED = 2  # rounds until caches and allocators have what they need
TOLERANCE = 16.0  # MiB that the process may grow: the C library keeps what is freed, in pieces
EVENTS = ("germinated", "pruned", "rollbacks")


class Reading(NamedTuple):
    """After one round."""

    tensors: float  # MiB, of the storage of all tensors alive
    resident: float  # MiB, of the process
    places: dict[str, int]  # of every tensor of weights, momenta, statistics and snapshots
    events: dict[str, int]  # by EVENTS, in the round


class FaultyWorld(World):
    """At every third env-step one host's weights turn into NaN before they are trained."""

    def work(self, step: int) -> StepData:
        if step % 3 == 2:
            params = self.weights["host", "params"]
            params[step % params.shape[0]] = math.nan
        return super().work(step)


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def tensors() -> float:
    """Memory behind all ordinary tensors that Python can reach, each piece counted once."""
    kept = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = [item.untyped_storage() for item in kept if item.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / MIB


def soak(envs: int, steps: int, rounds: int) -> list[Reading]:
    """Rounds with updates of hosts whose seeds mature within a few env-steps."""
    cfg = TrainConfig(
        envs=envs,
        steps=steps,
        batch_size=8,
        train_samples=32,
        val_samples=16,
        slots=["r0c0", "r0c1", "r0c2"],
        task=TaskConfig(name="soak", base_channels=8, num_blocks=4, num_pools=4),
        data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=32),
        gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.3),
        lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1),
        policy=PolicyConfig(network=NetworkConfig(hidden=32, features=32), ppo=PPOConfig(epochs=2)),
        telemetry=TelemetryConfig(progress="off"),
    )
    device = torch.device("cpu")
    keep_freed_memory(device)
    sizes = Sizes(cfg.envs, cfg.batch_size, cfg.train_samples, cfg.val_samples)
    images = load_images(cfg.data, device)
    world = FaultyWorld(build_rules(cfg, device), images, sizes, cfg.data, cfg.seed)
    player = build_player(cfg, world)
    progress = Progress(1, Console(file=io.StringIO()), "off")
    readings = []
    for number in range(rounds):
        result, rollout = play_round(world, player, Round(number, progress))
        assert player.learner is not None
        assert rollout is not None
        player.learner.update(rollout)
        del rollout
        gc.collect()
        weights = world.weights.flatten_keys(".").items()
        places = {name: value.data_ptr() for name, value in weights}
        events = {name: result.seeds[name] for name in EVENTS}
        readings.append(Reading(tensors(), resident(), places, events))
    return readings


@pytest.mark.slow
def test_a_kept_tensor_shows_to_the_byte() -> None:
    (before,) = soak(1, 2, 1)
    kept = torch.zeros(2**18)  # float32: one MiB
    (after,) = soak(1, 2, 1)
    assert kept.sum() == 0
    assert after.tensors - before.tensors == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_twenty_rounds_with_germinations_prunes_and_rollbacks_leave_memory_flat() -> None:
    readings = soak(4, 20, 20)
    settled = readings[SETTLED - 1]
    later = readings[SETTLED:]
    assert max(one.tensors for one in later) <= settled.tensors
    assert max(one.resident for one in later) <= settled.resident + TOLERANCE
    assert all(one.places == settled.places for one in readings)
    for name in EVENTS:
        assert any(one.events[name] for one in later), name
