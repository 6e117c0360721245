"""Small runs that can be compared bit for bit: their settings, lines and checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.env import GatesConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.training.files.checkpoint import load_checkpoint
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.answers import GROWN, read_answers
from tests.builders import tiny_runs
from tests.builders.tiny_runs import timeless

CPU = torch.device("cpu")
ROUNDS = 4
STEPS = 3


def settings(player: str = "ppo", **changed: object) -> TrainConfig:
    given: dict = {"rounds": ROUNDS, "steps": STEPS, "gates": GatesConfig(min_gradient_health=0.3)}
    return tiny_runs.settings(player, **given | changed)


def lines(path: Path) -> list[dict]:
    """metrics.jsonl without what a clock wrote."""
    return timeless(path / "metrics.jsonl")


def same(one: object, other: object, place: str = "") -> None:
    """Assert that two contents of checkpoints agree bit for bit."""
    assert type(one) is type(other), place
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=place)
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), place
        for name, value in one.items():
            same(value, other[name], f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), place
        for at, value in enumerate(one):
            same(value, other[at], f"{place}.{at}")
    else:
        assert one == other, place


def content(path: Path, rounds: int) -> dict:
    """What the checkpoint says of the run, without time, place and plan."""
    saved = load_checkpoint(RunFolder(path).checkpoint(rounds), CPU)
    for task in saved["tasks"].values():
        del task["progress"]["seconds"]
    del saved["settings"]
    return saved


def assert_equal_runs(one: Path, other: Path, rounds: int = ROUNDS) -> None:
    assert len(lines(one)) == rounds
    assert lines(one) == lines(other)
    assert (one / "episodes.jsonl").read_bytes() == (other / "episodes.jsonl").read_bytes()
    same(content(one, rounds), content(other, rounds))
    mine, its = (read_answers(RunFolder(path).answers).right[GROWN] for path in (one, other))
    assert np.array_equal(mine, its)
    for kind in ("best", "hosts"):
        mine, its = (RunFolder(path).network_files(kind)[-1] for path in (one, other))
        assert (mine.name, mine.read_bytes()) == (its.name, its.read_bytes())


def with_own(*names: str, **changed: object) -> TrainConfig:
    """The small run whose hosts grow these blueprints of parts_of_users."""
    cfg = settings(**{"rounds": 6, "steps": 4} | changed)
    blueprints = ["norm", *(f"parts_of_users:{name}" for name in names)]
    return replace(cfg, task=replace(cfg.task, blueprints=blueprints))
