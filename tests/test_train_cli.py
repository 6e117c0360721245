"""The command line as a user meets it: exit status, one clear message, start-up without torch.

Every run here ends before torch would be imported, so that each takes half a second.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def command_line(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HYDRA_FULL_ERROR": "0"}
    command = [sys.executable, "-m", "esper_soa.train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("envs=0", "envs=0: must be in [1, 1048576]."),
        ("slots=[r0c0,r7c7]", "slots=r7c7: must be a slot of cifar_baseline: r0c0"),
        ("task.blueprints=[conv_huge]", "task.blueprints=conv_huge: must be one of conv_light"),
    ],
)
def test_a_mistake_that_we_find_ends_with_status_2_and_one_line(tmp_path: Path, override: str, told: str) -> None:
    done = command_line(override, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [("task=cifar_huge", "Could not find 'task/cifar_huge'"), ("nonsense=1", "Key 'nonsense' not in 'TrainConfig'")],
)
def test_a_mistake_that_hydra_finds_ends_with_its_status_and_message(tmp_path: Path, override: str, told: str) -> None:
    done = command_line(override, folder=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = command_line(f"run_dir={in_the_way}/run", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: run_dir={in_the_way}/run: cannot be written (Not a directory)")
    assert done.stderr.count("\n") == 1


def test_a_folder_with_results_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    done = command_line(f"run_dir={tmp_path}", folder=tmp_path)
    assert done.returncode == 2
    assert "already holds the results of a run (summary.json)" in done.stderr


def test_the_settings_are_shown_without_running(tmp_path: Path) -> None:
    done = command_line("+experiment=smoke", "device=cuda:1", "--cfg", "job", folder=tmp_path)
    assert done.returncode == 0
    assert "\ndevice: cuda:1\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point_imports_neither_torch_nor_numpy() -> None:
    slow = "{'torch', 'numpy', 'tensordict'}"
    program = f"import sys, esper_soa.train, esper_soa.command; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
