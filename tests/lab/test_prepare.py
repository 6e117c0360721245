"""`esper-train --prepare` makes what the first run of its settings would make or go without."""

from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from esper_soa.runtime.step_cache import LIBRARY_FILES
from tests.builders import warm
from tests.builders.program import ENVIRONMENT, command

MINUTES = 25  # a guard against waiting for ever: inductor takes minutes of a slow core
SETTINGS = ("+experiment=smoke", "device=cpu", "compute.engine=torch", "envs=2", "steps=4")


def begun(*words: str, folder: Path, **environment: str) -> Popen:
    """A process of esper-train with an empty cache of its own."""
    environment = ENVIRONMENT | environment | {"XDG_CACHE_HOME": str(folder / "cache")}
    return warm.Popen(command(*words), cwd=folder, env=environment, stdout=PIPE, stderr=PIPE)


def said_by(process: Popen) -> str:
    """The output of a process that ends well."""
    said, errors = process.communicate(timeout=MINUTES * 60)
    assert process.returncode == 0, errors.decode()
    return str(said.decode())


def finished(*words: str, folder: Path) -> str:
    """The output of such a process."""
    return said_by(begun(*words, folder=folder))


def test_what_is_there_is_said_and_no_run_is_left(tmp_path: Path) -> None:
    said = finished("--prepare", *SETTINGS, "compute.compile=off", folder=tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == ["data", "kernels", "state"]
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_first_starts_compile_once_and_the_next_are_compiled_whatever_their_numbers(
    tmp_path: Path,
) -> None:
    compiler = tmp_path / "counting-g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    starts = [
        begun("--prepare", *SETTINGS, f"seed={seed}", folder=tmp_path, CXX=str(compiler))
        for seed in range(3)
    ]
    assert all("state: compiled ahead of time" in said_by(start) for start in starts)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-shared" in call for call in calls) == len(LIBRARY_FILES)
    numbers = ["lifecycle.embargo_steps=7", "gates.min_blending_steps=4", "reward.pbrs_weight=0.1"]
    sizes = ["reward.rent_weight=1", "envs=3", "steps=6", "seed=5", "task.base_channels=4"]
    for number, words in enumerate(([], numbers, sizes)):
        finished(*SETTINGS, "rounds=1", f"run_dir=run{number}", *words, folder=tmp_path)
        log = (tmp_path / f"run{number}" / "log.txt").read_text()
        assert "kernels of the env state: compiled ahead of time" in log
