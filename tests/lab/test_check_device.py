"""The table of engines that `esper-train --check-device` prints."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig
from esper_soa.lab.check_device import check_device, engine_table, memory_table
from esper_soa.nets.needs import PASSED, UPDATED, Need
from esper_soa.nets.trial import TrialResult
from esper_soa.training.loop.build import make_setup
from tests.builders.program import finished
from tests.builders.tiny_world import tiny_settings


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rows_of(console: Console) -> list[str]:
    """The lines that were printed but for rules, with one space between words."""
    lines = (" ".join(line.split()) for line in printed(console).splitlines())
    return [line for line in lines if line.strip("─ ")]


def test_every_engine_has_its_row_and_the_quickest_is_told() -> None:
    rows = [
        TrialResult("native", "", 1e-6, 0.010),
        TrialResult("torch", "", 0.0, 0.025, 300 * 2**20),
        TrialResult("triton", "no GPU"),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(engine_table(rows, make_setup(TrainConfig(), torch.device("cpu"))))
    assert [line.rstrip() for line in printed(console).splitlines()] == [
        "engines at N=8 B=32 T=256 V=256, cifar_baseline",
        "",
        "  engine   ms per env-step   MiB   off torch in float32   verdict",
        f" {'─' * 74}",
        "  native             10.00         1.0e-06                agrees, quickest",
        "  torch              25.00   300   0.0e+00                agrees",
        "  triton                                                  no GPU",
        "",
    ]


def test_a_cpu_is_checked_on_the_shapes_of_a_run() -> None:
    console = Console(file=io.StringIO(), width=140)
    cfg = tiny_settings(3, 2, 4)
    cfg.device = "cpu"
    check_device(cfg, console)
    shown = rows_of(console)
    for words in ("cpu (", "engines at N=3 B=", "native ", "torch ", "together, as far as at the "):
        assert [line for line in shown if line.startswith(words)] != []
    assert sum(line.endswith("agrees, quickest") for line in shown) == 1
    rules = (
        "compute.engine=auto takes the native kernels of a CPU wherever they are proven, whatever "
        "the times.",
        "compute.cuda_graphs=auto replays nothing on a CPU.",
    )
    assert [rule for rule in rules if rule not in shown] == []
    assert "left out" not in "".join(shown)


def test_every_task_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [TrialResult("torch", "", 0.0, 0.025, 2**20)]
    monkeypatch.setattr("esper_soa.lab.check_device.probe_engines", lambda *_: engines)
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
    console = Console(file=io.StringIO(), width=140)
    for free in (None, 3 * 2**29):
        monkeypatch.setattr("esper_soa.lab.check_device.free_memory", lambda _, free=free: free)
        console.print(memory_table(parts, torch.device("cpu")))
    table = ["memory, at least", "part5 5.0 MiB", "part4 4.0 MiB", "part3 3.0 MiB"]
    table.append("together, as far as at the same time 8.0 MiB")
    assert rows_of(console) == [*table, "free on cpu unknown", *table, "free on cpu 1.5 GiB"]


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
