"""Memory over many rounds with germinations, prunes, injected faults and rollbacks: it must stay
flat.

`python -m benchmarks.soak` plays tiny rounds with policy updates in one process, damages a host at
declared env-steps, and prints the memory of all live tensors and of the process after every round,
with a JSON line last. It ends with status 1 where tensors grew at all after the second round, or
the process by more than the tolerance (the C library keeps what is freed, in pieces), where weights
moved, or where nothing happened.
"""

import argparse
import gc
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from esper_soa.agent.config import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.build import build_player, build_rules
from esper_soa.config import TelemetryConfig, TrainConfig
from esper_soa.env.config import GatesConfig, LifecycleConfig
from esper_soa.env.step import Work
from esper_soa.env.world import Sizes, World
from esper_soa.nets.config import DataConfig, TaskConfig
from esper_soa.nets.datasets import load_images
from esper_soa.ops.collect import Round, play_round
from esper_soa.ops.device import apply_threads, device_name, keep_freed_memory, resolve_device
from esper_soa.ops.progress import Progress

MIB = 2**20
SETTLED = 2  # rounds until caches and allocators have what they need
EVENTS = ("germinated", "pruned", "rollbacks")


class Reading(NamedTuple):
    """After one round."""

    tensors: float  # MiB, of the storage of all tensors alive
    resident: float  # MiB, of the process
    moved: bool  # some weight lies elsewhere than before the first round
    events: dict[str, int]  # by EVENTS, in the round


def settings(envs: int, steps: int) -> TrainConfig:
    """Hosts whose seeds mature within a few env-steps, and a policy that learns."""
    return TrainConfig(
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


class FaultyWorld(World):
    """At every third env-step one host's weights turn into NaN before they are trained."""

    def work(self, step: int) -> Work:
        """The work of env-step `step`, after the damage."""
        if step % 3 == 2:
            params = self.weights["host", "params"]
            params[step % params.shape[0]] = math.nan
        return super().work(step)


def faulty_world(cfg: TrainConfig, device: torch.device) -> FaultyWorld:
    """The hosts of `cfg` on `device`, with the engine that a run would give them."""
    keep_freed_memory(device)
    sizes = Sizes(cfg.envs, cfg.batch_size, cfg.train_samples, cfg.val_samples)
    return FaultyWorld(
        build_rules(cfg, device), load_images(cfg.data, device), sizes, cfg.data, cfg.seed
    )


def resident() -> float:
    """Memory of this process that is in use, MiB; Linux only."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def tensors() -> float:
    """Memory behind all ordinary tensors that Python can reach, each piece counted once, MiB."""
    kept = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = [item.untyped_storage() for item in kept if item.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / MIB


def soak(cfg: TrainConfig, rounds: int, device: torch.device) -> list[Reading]:
    """Play `rounds` rounds with updates, and read memory after each."""
    world = faulty_world(cfg, device)
    player = build_player(cfg, world)
    readings: list[Reading] = []
    places = addresses(world)
    with Progress(1, Console(file=io.StringIO()), "off") as progress:
        for number in range(rounds):
            result, rollout = play_round(world, player, Round(number, progress))
            if player.learner is not None and rollout is not None:
                player.learner.update(rollout)
            events = {name: result.seeds[name] for name in EVENTS}
            del rollout
            gc.collect()
            readings.append(Reading(tensors(), resident(), addresses(world) != places, events))
            print(shown(number, readings[-1]), flush=True)
    return readings


def shown(number: int, reading: Reading) -> str:
    """The line of round `number` (from 0)."""
    events = "  ".join(f"{name} {count}" for name, count in reading.events.items())
    return (
        f"round {number + 1:3d}  tensors {reading.tensors:8.4f} MiB  process "
        f"{reading.resident:8.2f} MiB  {events}"
    )


def addresses(world: World) -> dict[str, int]:
    """Where every tensor of weights, momenta, statistics and snapshots lies."""
    return {name: value.data_ptr() for name, value in world.weights.flatten_keys(".").items()}


def complaints(readings: list[Reading], tolerance: float) -> list[str]:
    """What is wrong: growth after round SETTLED (of the process, beyond `tolerance` MiB), moved
    weights, no events.
    """
    found = []
    settled = readings[SETTLED - 1]
    later = readings[SETTLED:]
    growth = max(reading.tensors for reading in later) - settled.tensors
    if growth > 0:
        found.append(f"tensors grew by {growth:.6f} MiB after round {SETTLED}")
    growth = max(reading.resident for reading in later) - settled.resident
    if growth > tolerance:
        found.append(
            f"the process grew by {growth:.2f} MiB after round {SETTLED}, more than {tolerance} MiB"
        )
    if any(reading.moved for reading in readings):
        found.append("weights moved: something was allocated anew")
    for name in EVENTS:
        if not any(reading.events[name] for reading in later):
            found.append(f"nothing {name} after round {SETTLED}")
    return found


def main() -> None:
    """Play, print, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("rounds", 20), ("envs", 4), ("steps", 20), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--tolerance", type=float, default=16.0, help="MiB that the process may grow after round 2"
    )
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.rounds <= SETTLED:
        parser.error(f"--rounds {options.rounds}: must be at least {SETTLED + 1}")
    apply_threads(options.threads)
    device = resolve_device(options.device)
    readings = soak(settings(options.envs, options.steps), options.rounds, device)
    wrong = complaints(readings, options.tolerance)
    work = {name: getattr(options, name) for name in ("rounds", "envs", "steps", "tolerance")}
    memory = {
        name: [round(reading._asdict()[name], 4) for reading in readings]
        for name in ("tensors", "resident")
    }
    print(
        json.dumps(
            {"benchmark": "soak", **work, "device": device_name(device), **memory, "wrong": wrong}
        )
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
