"""The table of engines that `esper-train --check-device` prints."""

import io
from pathlib import Path

import pytest
import torch
from program import finished
from rich.console import Console
from tiny_world import tiny_settings

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.check_device import check_device, engine_table, memory_table
from esper_soa.nets.trial import TrialResult
from esper_soa.runtime.memory import PASSED, UPDATED, Need


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_engine_has_its_row_and_the_quickest_is_told() -> None:
    rows = [
        TrialResult("native", "", 1e-6, 0.010),
        TrialResult("torch", "", 0.0, 0.025, 300 * 2**20),
        TrialResult("triton", "no GPU"),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(engine_table(rows, TrainConfig()))
    lines = [line.split() for line in printed(console).splitlines()]
    assert ["native", "10.00", "1.0e-06", "agrees,", "quickest"] in lines
    assert ["torch", "25.00", "300", "0.0e+00", "agrees"] in lines
    assert ["triton", "no", "GPU"] in lines


def test_a_cpu_is_checked_on_the_shapes_of_a_run() -> None:
    console = Console(file=io.StringIO(), width=140)
    cfg = tiny_settings(3, 2, 4)
    cfg.device = "cpu"
    check_device(cfg, console)
    shown = printed(console)
    told = ("cpu (", "N=3 B=", "native", "torch", "agrees, quickest", "wherever they are proven")
    for words in (*told, "replays nothing", "together"):
        assert words in shown
    assert "left out" not in shown


def test_every_task_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [TrialResult("torch", "", 0.0, 0.025, 2**20)]
    monkeypatch.setattr("esper_soa.lab.check_device.probe_engines", lambda trial: engines)
    tasks = "tasks=[cifar_impaired,'cifar_minimal envs=3']"
    console = Console(file=io.StringIO(), width=140)
    check_device(compose_settings("smoke", ["device=cpu", "envs=2", tasks]), console)
    titles = [line.split() for line in printed(console).splitlines() if "engines at" in line]
    assert [(words[2], words[-1]) for words in titles] == [
        ("N=2", "cifar_impaired"),
        ("N=3", "cifar_minimal"),
    ]


def test_what_is_needed_at_other_times_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"": 3, PASSED: 5, UPDATED: 4}
    parts = [Need(f"part{size}", size * 2**20, (), during) for during, size in sizes.items()]
    monkeypatch.setattr("esper_soa.lab.check_device.needs", lambda cfg, device: parts)
    console = Console(file=io.StringIO(), width=140)
    for free in (None, 3 * 2**29):
        monkeypatch.setattr("esper_soa.lab.check_device.free_memory", lambda _, free=free: free)
        console.print(memory_table(TrainConfig(), torch.device("cpu")))
    lines = [line.split() for line in printed(console).splitlines()]
    assert ["part4", "4.0", "MiB"] in lines
    assert [line[-2] for line in lines if line[:1] == ["together,"]] == ["8.0", "8.0"]
    assert [line[3:] for line in lines if line[:1] == ["free"]] == [["unknown"], ["1.5", "GiB"]]


@pytest.mark.slow
def test_the_command_line_checks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = finished("--check-device", "+experiment=smoke", "device=cpu", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cifar_impaired" in done.stdout
    assert "free on cpu" in done.stdout
    assert list(tmp_path.iterdir()) == []
    refused = finished("--check-device", "envs=0", folder=tmp_path)
    assert refused.returncode == 2
    assert "envs=0: must be in" in refused.stderr
