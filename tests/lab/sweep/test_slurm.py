"""Slurm, which is not here: what sbatch is asked, and, with a stand-in, a preempted job."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.builders.program import wait_until
from tests.builders.sweeping import LONG, holder, jobs_of, rounds_of, started_sweep

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

STAND_IN = Path(__file__).parents[2] / "builders" / "local_slurm.py"
GPU = ("hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1")
ASKED = ["+sweep=slurm", *LONG, *GPU, "seed=1,2"]


def stand_in(folder: Path) -> dict[str, str]:
    """The environment of a program that finds the stand-in for Slurm, which lives in `folder`."""
    (folder / "bin").mkdir(parents=True)
    for name in ("sbatch", "srun", "scontrol", "sacct"):
        program = folder / "bin" / name
        program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
        program.chmod(0o755)
    return {"LOCAL_SLURM": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_job_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    cluster = stand_in(tmp_path / "slurm")
    process = started_sweep(*ASKED, folder=tmp_path, **cluster)
    run = tmp_path / "sweep" / "0"
    wait_until(lambda: len(rounds_of(run)) >= 2, process)
    job = holder(run)
    os.kill(job, signal.SIGTERM)  # as Slurm does first; submitit passes over it
    os.kill(job, signal.SIGUSR2)
    wait_until(lambda: holder(run) != job, process)
    rounds = len(rounds_of(run))
    assert process.wait(300) == 0, (tmp_path / "sweep.log").read_text()
    assert (tmp_path / "slurm" / "requeued").read_text() == "77_0\n"
    assert jobs_of(tmp_path) == {"seed=1": "done", "seed=2": "done"}
    assert rounds_of(run) == list(range(1, 25))
    assert json.loads((run / "summary.json").read_text())["rounds_before"] == rounds
    assert jobs_of(tmp_path, "folder")["seed=1"] == str(run)

    asked = (tmp_path / "slurm" / "script").read_text().splitlines()
    options = {"array=0-1%2", "cpus-per-task=8", "gpus-per-node=1", "mem=16GB", "nodes=1"}
    options |= {"ntasks-per-node=1", "requeue", "open-mode=append", "partition=gpu", "time=240"}
    options |= {"signal=USR2@120", "job-name=train"}
    assert {f"#SBATCH --{option}" for option in options} <= {*asked}
    again = started_sweep(*ASKED, folder=tmp_path, **cluster)
    assert again.wait(300) == 0
    assert jobs_of(tmp_path) == {"seed=1": "done", "seed=2": "done"}
    assert rounds_of(run) == list(range(1, 25))
