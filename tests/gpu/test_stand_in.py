"""Whole runs on a CUDA device made of host memory (stand_in_cuda.py): no race or misuse, and in no
env-step or minibatch more waits of the host, copies of pageable memory and uploads than waits.yaml
says.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

STAND_IN = Path(__file__).with_name("stand_in_cuda.py")
ROOT = STAND_IN.parents[2]
CASES = yaml.safe_load(STAND_IN.with_name("waits.yaml").read_text())
TURNS = 18  # env-steps of a run, and minibatches: three rounds of six
TINY = (
    "+experiment=smoke device=cuda compute.engine=torch compute.precision=float32 envs=4 rounds=3 "
    "steps=6 train_samples=16 val_samples=8 batch_size=8 data.synthetic_train=32 control=none "
    "data.synthetic_test=16 telemetry.progress=off checkpoint_every=1 policy.ppo.epochs=2 "
    "policy.ppo.minibatches=3 policy.ppo.target_kl=0 gates.min_gradient_health=0 "
    "gates.min_blending_steps=1 lifecycle=auto_forward "
)


def reports_of(name: str, folder: Path) -> list[dict]:
    """What the stand-in tells of each process of a run."""
    report = folder / "report.jsonl"
    options = [
        "--package=esper_soa/",
        f"--report={report}",
        *CASES[name].get("options", "").split(),
    ]
    asked = [*shlex.split(TINY + CASES[name]["words"]), f"run_dir={folder / 'run'}"]
    command = [sys.executable, str(STAND_IN), *options, "-m", "esper_soa.train", *asked]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "own_parts")])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RNN module weights" not in done.stderr, "cuDNN copies the LSTM's together at every call"
    return [json.loads(line) for line in report.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13") or torch.version.cuda is not None,
    reason="the stand-in is written for CPU builds of torch 2.13",
)
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs C++")
@pytest.mark.parametrize("name", CASES)
def test_a_run_on_a_gpu_misuses_nothing_and_waits_no_more_than_it_may(
    name: str, tmp_path: Path
) -> None:
    for report in reports_of(name, tmp_path):
        assert [row for row in report["rows"] if row[0] == "FAULT"] == []
        for most, kind in (("waits", "wait"), ("pageable", "no wait"), ("pinned", "no wait")):
            word = most * (kind == "no wait")
            rows = [row for row in report["rows"] if row[0] == kind and word in row[1]]
            often = [row for row in rows if row[-1] >= TURNS]
            assert sum(row[-1] // TURNS for row in often) <= CASES[name][most], often
        assert (report["replays"] > 0) == CASES[name].get("replays", True)
