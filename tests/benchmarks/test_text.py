"""The table of text, and the command that makes its record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import ROOT
from benchmarks.text import NAMES, RUNS, SEEDS, play, record_of, table
from benchmarks.timing import BenchmarkError
from esper_soa.config.compose import compose_settings
from esper_soa.training.loop.controls import widen_host

FACTS = {"cpu": "CPU", "cores": 2, "torch": "2.13"}
HEAD = {"time": "2026-11-25T22:00:00Z", "commit": "abcdef12", "machine": FACTS, "seeds": [301, 302]}
TINY = ("envs=1", "steps=3", "train_samples=16", "val_samples=8", "policy.schedule.germinate=[1]")


def side(loss: float, accuracy: float, size: float) -> dict[str, float]:
    return {"test_loss": loss, "test_accuracy": accuracy, "size": size, "flop": size * 1e7}


def finished(folder: Path, run: str, seed: int, **sides: dict[str, float]) -> Path:
    """The folder of a run that has ended."""
    own = folder / f"{run}-{seed}"
    own.mkdir()
    facts = {"envs": 4, "steps": 60, "test_images": 1180}
    (own / "summary.json").write_text(json.dumps(facts | sides))
    (own / "versions.json").write_text(json.dumps({"git": "0123456789ab"}))
    return own


def test_the_table_sets_grown_hosts_beside_the_others_by_random_seed(tmp_path: Path) -> None:
    for place, seed in enumerate((301, 302)):
        grown = side(1.5 + 0.1 * place, 56.0, 73472)
        finished(
            tmp_path, "static_final", seed, grown=grown, control=side(1.7 + place * 0.2, 55, 73472)
        )
        finished(tmp_path, "wait", seed, grown=side(1.8, 54.0, 48416))
        finished(tmp_path, "static_large", seed, grown=side(1.4, 57.0, 72040))
    folders = {run: [play(run, seed, (), tmp_path) for seed in (301, 302)] for run in RUNS}
    lines = table([HEAD | record_of(folders)])
    rows = {line.split(" | ")[0].lstrip("| "): line.split(" | ")[1:] for line in lines[2:6]}
    assert list(rows) == list(NAMES.values())
    # means 1.55, half a difference of 0.05 times t of one degree of freedom, 12.706
    assert rows["grown by a fixed schedule"][0] == "1.550 [0.915, 2.185]"
    assert rows["plain hosts of the grown size"][2:] == [
        "72,040",
        "720",
        "+0.150 [-0.485, +0.785]",
        "0 of 2",
        "0.5000 |",
    ]
    # 1.5 - 1.7 and 1.6 - 1.9
    assert rows["the final grown networks, trained from scratch"][4:6] == [
        "-0.250 [-0.885, +0.385]",
        "2 of 2",
    ]
    assert "Random seeds 301 to 302, 4 hosts each, 60 env-steps, 1,180 test sequences" in lines[-2]
    assert "Runs of commit 01234567;" in lines[-2]


def test_the_wider_host_is_that_of_the_control_of_the_grown_size() -> None:
    cfg = compose_settings("text_3seed", RUNS["static_large"])
    grown = compose_settings("text_3seed", ())
    assert widen_host(grown.task, 73_472) == cfg.task
    assert len(SEEDS) == 10


def test_a_run_that_fails_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="wait-301 ended with status 2"):
        play("wait", 301, ("envs=0",), tmp_path)


@pytest.mark.slow
def test_the_command_plays_what_is_missing_and_prints_the_table(tmp_path: Path) -> None:
    words = ["--seeds", "2", "--results", "", "--folder", str(tmp_path), *TINY]
    line = [sys.executable, "-m", "benchmarks.text", *words]
    first = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "static_large seed 302" in first
    assert f"| {NAMES['wait']} | " in first
    again = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "seed 301\n" not in again
    assert again.splitlines()[:7] == [one for one in first.splitlines() if "seed 30" not in one][:7]
