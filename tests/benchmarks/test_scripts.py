"""Every script of benchmarks/ does a little work and keeps the record that its table is made of."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.builders import warm
from tests.builders.lanes import some_of

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
purpose: A recipe of a test.
stages:
  - {name: first, settings: [+experiment=smoke, policy.init=none, rounds=1, steps=2, envs=2]}
  - {name: second, settings: [+experiment=smoke, rounds=1, steps=2, envs=2, seed=2]}
"""
RUN = "envs=2 train_samples=32 val_samples=8 policy.ppo.minibatches=1"
EPS = (
    "envs=2 batch_size=4 train_samples=8 val_samples=8 num_slots=2 repeats=2 steps=6 timed_steps=1 "
    "limits=false compute.compile=off percentile_steps=3 results={folder}"
)
TEXT = "envs=1 steps=3 train_samples=16 val_samples=8 policy.schedule.germinate=[1]"
# Commands by the script and what they do, and the file that is there afterwards.
COMMANDS = {
    "eps: the engine": (f"{EPS} live=1 sides=[engine]", "custom.jsonl"),
    "eps: all sides": (f"{EPS} sides=[engine,baseline,bare]", "custom.jsonl"),
    "eps: text": (f"{EPS} +work=t values=[2] live=2", "t.jsonl"),
    "sleepers": (
        "--envs 4 --batch 2 --train 2 --val 2 --repeats 2 --engine torch --results {folder}",
        "sleepers.jsonl",
    ),
    "kernels": ("--envs 1 3 --modes eager --repeats 3 --steps 24 --results {folder}", ""),
    "environments": (
        "--experiment smoke --envs 2 --steps 2 --repeats 2 --results {folder}",
        "environments.jsonl",
    ),
    "gpu": ("--device cpu --tiny --only parity:graphs --results {folder}", "gpu.jsonl"),
    "growth_figure": (f"--out {{folder}}/growth.svg steps=2 {RUN}", "growth.svg"),
    "proof": (
        "--name tiny --seeds 2 --folder {folder}/units --results {folder} steps=2 " + RUN,
        "tiny.jsonl",
    ),
    "proof: the main run": (
        "--main --name tiny --seeds 2 --folder {folder}/units --results {folder} steps=2 rounds=1 "
        + RUN,
        "tiny.jsonl",
    ),
    "ship": ("{folder}/plan.yaml --folder {folder}/runs --into {folder}/policies", ""),
    "table": ("", ""),
    "text": ("--seeds 2 --folder {folder}/runs --results {folder} " + TEXT, "text.jsonl"),
}
NEEDS = {"environments": ("sb3_contrib", "torchrl", "gymnasium")}


def test_every_script_is_tried() -> None:
    scripts = (ROOT / "benchmarks").glob("*.py")
    known = {name.partition(":")[0] for name in COMMANDS}
    assert {path.stem for path in scripts if "__main__" in path.read_text()} == known


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", some_of(COMMANDS, "table"))
def test_a_script_does_a_little_work_and_keeps_its_record(name: str, tmp_path: Path) -> None:
    script = name.partition(":")[0]
    if not all(importlib.util.find_spec(package) for package in NEEDS.get(script, ())):
        pytest.skip("needs the extra envs")
    (tmp_path / "plan.yaml").write_text(PLAN)
    arguments, file = COMMANDS[name]
    command = [sys.executable, "-m", f"benchmarks.{script}"]
    command += shlex.split(arguments.format(folder=tmp_path))
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if file.endswith(".jsonl"):
        record = json.loads((tmp_path / file).read_text().splitlines()[-1])
        assert {"benchmark", "method", "time", "commit", "machine"} <= set(record)
    assert (tmp_path / file).exists()
