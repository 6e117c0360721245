"""Whole runs in this process: two hosts of some hundred weights on a few synthetic images."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import (
    OF_A_TASK,
    ComputeConfig,
    EvaluateConfig,
    TelemetryConfig,
    TrainConfig,
    WorldConfig,
)
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.evaluation import Verdict, evaluate_in_session
from esper_soa.training.loop.trainer import run_in_session
from esper_soa.training.results.final_table import Summary
from esper_soa.training.results.progress import Progress
from esper_soa.training.start.begin import resume_start


def settings(player: str = "ppo", **changed: object) -> TrainConfig:
    """Three rounds of `player`, each with its checkpoint; `changed`: fields with other values."""
    cfg = TrainConfig(
        device="cpu",
        envs=2,
        rounds=3,
        steps=3,
        batch_size=4,
        train_samples=4,
        val_samples=8,
        slots=["r0c0", "r0c1"],
        control="none",
        checkpoint_every=1,
        report=False,
        task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
        data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=16),
        policy=PolicyConfig(
            name=player, network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=2)
        ),
        telemetry=TelemetryConfig(progress="off"),
        compute=ComputeConfig(threads=1, workers=1),
    )
    return replace(cfg, **changed)  # type: ignore[arg-type]


def on_tasks(*alone: TrainConfig) -> TrainConfig:
    """The first of these, on the tasks of all of them."""
    worlds = {
        cfg.task.name: WorldConfig(**{n: getattr(cfg, n) for n in OF_A_TASK}) for cfg in alone
    }
    return replace(alone[0], worlds=worlds)


def run(cfg: TrainConfig, folder: RunFolder, checkpoint: Path | None = None) -> Summary:
    """A run of `cfg` in a session of its own, of several tasks that of the first."""
    with session(folder) as opened:
        return run_in_session(opened, cfg, checkpoint)[0]


def evaluate(cfg: EvaluateConfig, folder: RunFolder) -> list[Verdict]:
    """An evaluation in a session of its own, of several tasks that of the first."""
    with session(folder) as opened:
        return next(iter(evaluate_in_session(opened, cfg).values()))


def fresh(cfg: TrainConfig, path: Path) -> Summary:
    """A run of `cfg` in the folder `path`, to its end."""
    path.mkdir(exist_ok=True)
    return run(cfg, RunFolder(path))


def resumed(cfg: TrainConfig, path: Path, checkpoint: str = "") -> Summary:
    """`cfg` from `checkpoint` in the folder `path` on, or from the newest one."""
    start = resume_start(str(path / checkpoint), "", cfg.name)
    return run(replace(cfg, resume="given"), start.folder, start.checkpoint)


def records(path: Path) -> list[dict]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_of(path: Path) -> list[str]:
    """The lines of the log in the folder `path`, from their level on."""
    return [line.split(" ", 2)[2] for line in (path / "log.txt").read_text().splitlines()]


def signal_at(monkeypatch: pytest.MonkeyPatch, number: int, report: int) -> None:
    """Send `number` to this process just before the `report`-th report of an env-step from now."""
    reports = itertools.count(1)
    plain = Progress.advance

    def signal_and_advance(
        self: Progress, env_steps: int, label: str, accuracy: float, reward: float
    ) -> None:
        if next(reports) == report:
            os.kill(os.getpid(), number)
        plain(self, env_steps, label, accuracy, reward)

    monkeypatch.setattr(Progress, "advance", signal_and_advance)


TIMES = ("eps", "collect_seconds", "update_seconds")


def timeless(path: Path) -> list[dict]:
    """The lines of a file of JSON without what a clock says."""
    return [
        {name: value for name, value in line.items() if name not in TIMES} for line in records(path)
    ]
