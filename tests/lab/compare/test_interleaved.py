"""Runs that take turns in one process are the runs that they are alone; one that fails, or a
signal, loses nothing.
"""

import os
import shlex
import signal
from pathlib import Path

import pytest
from tiny_runs import timeless

import esper_soa
from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.compare.interleaved import train_interleaved
from esper_soa.runtime.signals import Interrupted

TINY = shlex.split(
    "steps=2 envs=2 train_samples=8 val_samples=8 batch_size=8 control=none report=false "
    "compute.engine=torch data.synthetic_train=32 data.synthetic_test=16"
)
GROUPS = {
    "shaped": ("rounds=3",),
    "net": ("rounds=2", "reward.mode=net"),
    "slow": ("rounds=3", "task.host_lr=0.001"),
}
Turn = tuple[int, list[str]]


def overrides(folder: Path, groups: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    return {
        name: [*TINY, *own, f"run_dir='{folder / name}'", "resume=auto"]
        for name, own in groups.items()
    }


def composed(asked: dict[str, list[str]]) -> dict[str, tuple[TrainConfig, list[str]]]:
    return {name: (compose_settings("smoke", own), own) for name, own in asked.items()}


def lines_of(folder: Path) -> list[dict]:
    return timeless(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that were played one after the other, by name."""
    folder = tmp_path_factory.mktemp("alone")
    for asked in overrides(folder, GROUPS).values():
        esper_soa.train("smoke", asked)
    return folder


def test_runs_in_turns_are_those_alone_and_a_failure_ends_no_other(
    alone: Path, tmp_path: Path
) -> None:
    lost = ("rounds=3", "data.name=npz", "data.root=nowhere")
    asked = overrides(tmp_path, GROUPS | {"lost": lost})
    esper_soa.train("smoke", [*asked["shaped"], "rounds=1"])  # the others catch up first
    turns: list[Turn] = []

    def spoil(number: int, order: list[str]) -> None:
        turns.append((number, order))
        if number == 2:  # nothing can take the place of a folder
            (tmp_path / "net" / "summary.json").mkdir()

    failed = train_interleaved(composed(asked), spoil)
    assert failed.keys() == {"net", "lost"}
    assert "data.root=" in failed["lost"]
    assert "summary.json" in failed["net"]
    assert "summary.json" in (tmp_path / "net" / "log.txt").read_text().splitlines()[-1]
    assert turns == [(1, ["net", "slow"]), (2, ["slow", "net", "shaped"]), (3, ["shaped", "slow"])]
    for name in GROUPS:
        assert lines_of(tmp_path / name) == lines_of(alone / name)
        log = (tmp_path / name / "log.txt").read_text()
        assert [other for other in GROUPS if str(tmp_path / other) in log] == [name]
    assert (tmp_path / "slow" / "log.txt").read_text().count(" INFO hosts ") == 1
    assert lines_of(alone / "shaped")[1:] != lines_of(alone / "slow")[1:]


def test_a_signal_saves_all_of_them_and_the_next_call_goes_on(alone: Path, tmp_path: Path) -> None:
    asked = overrides(tmp_path, GROUPS)
    turns: list[Turn] = []

    def stop(number: int, order: list[str]) -> None:
        turns.append((number, order))
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_interleaved(composed(asked), stop)
    for name in GROUPS:
        assert len(list((tmp_path / name).glob("checkpoint_*.pt"))) == 1
    assert train_interleaved(composed(asked), lambda *turn: turns.append(turn)) == {}
    assert [order for _, order in turns] == [
        ["shaped", "net", "slow"],
        ["slow", "net", "shaped"],
        ["slow", "net", "shaped"],  # again, by the next call
        ["shaped", "slow"],
    ]
    for name in GROUPS:
        assert lines_of(tmp_path / name) == lines_of(alone / name)
