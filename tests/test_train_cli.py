"""The command line as a user meets it: exit status, one clear message, start-up without torch.

Every run here ends before torch would be imported, so that each takes half a second.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from esper_soa.arguments import prepared
from esper_soa.config import TrainConfig


def command_line(
    *arguments: str, folder: Path, program: str = "train"
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HYDRA_FULL_ERROR": "0"}
    command = [sys.executable, "-m", f"esper_soa.{program}", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("envs=0", "envs=0: must be in [1, 1048576]."),
        ("slots=[r0c0,r7c7]", "slots=r7c7: must be a slot of cifar_baseline: r0c0"),
        ("task.blueprints=[conv_huge]", "task.blueprints=conv_huge: must be one of conv_light"),
        ("env=4", "env: there is no such setting. Did you mean envs?"),
        (
            "policy.ppo.lrr=4",
            "policy.ppo.lrr: there is no such setting. Did you mean policy.ppo.lr?",
        ),
        ("rewards=net", "rewards: there is no such setting. Did you mean reward?"),
        (
            "compute.native=off",
            "compute.native: there is no such setting. Did you mean compute.engine?",
        ),
        ("compute.engine=cuda", "compute.engine=cuda: must be one of auto, native, torch, triton"),
        ("nonsense=1", "nonsense: there is no such setting."),
    ],
)
def test_a_mistake_that_we_find_ends_with_status_2_and_one_line(
    tmp_path: Path, override: str, told: str
) -> None:
    done = command_line(override, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("task=cifar_huge", "Could not find 'task/cifar_huge'"),
        ("experiment=smoke", "use +experiment=smoke"),
    ],
)
def test_a_mistake_that_hydra_finds_ends_with_its_status_and_message(
    tmp_path: Path, override: str, told: str
) -> None:
    done = command_line(override, folder=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = command_line(f"run_dir={in_the_way}/run", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: run_dir={in_the_way}/run: cannot be written (Not a directory)"
    )
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


def test_what_settings_hold_and_hydra_knows_passes(tmp_path: Path) -> None:
    given = [
        "hydra.job.name=x",
        "policy.ppo.probability_floor.op=0.01",
        "task=cifar_minimal",
        "~telemetry.anomaly.patience",
        "policy@policy=wait",
        "reward.mode=net",
    ]
    assert prepared(given, TrainConfig, ["task", "policy"]) == given


def test_a_sweep_may_be_asked_for_anywhere(tmp_path: Path) -> None:
    given = ["+experiment=smoke", "-m", "seed=1,2", "envs=0"]
    assert prepared(given, TrainConfig, []) == ["-m", "+experiment=smoke", "seed=1,2", "envs=0"]
    done = command_line(*given, folder=tmp_path)
    assert "unrecognized" not in done.stderr
    assert "envs=0: must be in" in done.stderr


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_help_fits_a_screen_and_the_version_is_ours(tmp_path: Path, program: str) -> None:
    shown = command_line("--help", folder=tmp_path, program=program)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert 8 < shown.stdout.count("\n") <= 28
    named = [
        "envs",
        "rounds",
        "steps",
        "batch_size",
        "train_samples",
        "val_samples",
        "experiment: ",
    ]
    assert all(
        name in shown.stdout
        for name in (named if program == "train" else ["checkpoint", "policies"])
    )
    version = command_line("--version", folder=tmp_path, program=program)
    assert version.returncode == 0
    assert version.stdout.startswith(f"esper-soa {metadata.version('esper-soa')} (Python 3.")
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point_imports_neither_torch_nor_numpy() -> None:
    slow = "{'torch', 'numpy', 'tensordict'}"
    program = (
        f"import sys, esper_soa.train, esper_soa.command; print(sorted({slow} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n"
