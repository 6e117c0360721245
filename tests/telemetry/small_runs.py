"""Settings of runs that take a second, and the lines that a run leaves."""

import json
from dataclasses import replace
from pathlib import Path

from esper_soa.agent.config import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config import ComputeConfig, TelemetryConfig, TrainConfig
from esper_soa.nets.config import DataConfig, TaskConfig

TIMES = ("eps", "collect_seconds", "update_seconds")


def settings(**changed: object) -> TrainConfig:
    """A run of two tiny hosts without a control."""
    plain = TrainConfig(
        envs=2,
        rounds=2,
        steps=6,
        batch_size=4,
        train_samples=4,
        val_samples=8,
        slots=["r0c0", "r0c1"],
        control="none",
        task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
        data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=16),
        policy=PolicyConfig(
            network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=1, minibatches=1)
        ),
        telemetry=TelemetryConfig(progress="off"),
        compute=ComputeConfig(threads=1, workers=1),
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict]:
    """The records in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[dict]:
    """The same, without what a clock says."""
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in lines(path)
    ]
