"""`esper-train --prepare` makes what the first run of its settings would make or go without."""

from pathlib import Path

import pytest

from tests.builders import warm
from tests.builders.program import ENVIRONMENT, command

MINUTES = 25  # a guard against waiting for ever: inductor takes minutes of a slow core
SETTINGS = ("+experiment=smoke", "device=cpu", "compute.engine=torch", "envs=2", "steps=4")


def finished(*words: str, folder: Path) -> str:
    """The output of a process of esper-train with an empty cache of its own."""
    environment = ENVIRONMENT | {"XDG_CACHE_HOME": str(folder / "cache")}
    given = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = warm.run(command(*words), timeout=MINUTES * 60, **given)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_what_is_there_is_said_and_no_run_is_left(tmp_path: Path) -> None:
    said = finished("--prepare", *SETTINGS, "compute.compile=off", folder=tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == ["data", "kernels", "state"]
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_next_runs_are_compiled_whatever_their_numbers(tmp_path: Path) -> None:
    finished("--prepare", *SETTINGS, folder=tmp_path)
    numbers = ["lifecycle.embargo_steps=7", "gates.min_blending_steps=4", "reward.pbrs_weight=0.1"]
    sizes = ["reward.rent_weight=1", "envs=3", "steps=6", "seed=5", "task.base_channels=4"]
    for number, words in enumerate(([], numbers, sizes)):
        finished(*SETTINGS, "rounds=1", f"run_dir=run{number}", *words, folder=tmp_path)
        log = (tmp_path / f"run{number}" / "log.txt").read_text()
        assert "kernels of the env state: compiled ahead of time" in log
