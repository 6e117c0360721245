"""Every launcher by real processes: a job that is killed in the middle costs no other, and the next
call finishes it.

Those that are not installed are skipped; Ray is one for an environment of its own.
"""

import importlib.util
import json
import signal
from pathlib import Path

import pytest

from tests.builders.program import PATIENCE, contents, lines, wait_until
from tests.builders.sweeping import (
    LONG,
    finished_sweep,
    holder,
    jobs_of,
    killed_in_the_middle,
    rounds_of,
    started_sweep,
)

LAUNCHERS = {
    "basic": ("hydra", []),
    "joblib": ("hydra_plugins.hydra_joblib_launcher", ["+sweep=joblib"]),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", ["+sweep=submitit_local"]),
    "ray": ("hydra_plugins.hydra_ray_launcher", ["+sweep=ray"]),
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_killed_costs_no_other_and_the_next_call_finishes_it(
    tmp_path: Path, launcher: str
) -> None:
    module, words = LAUNCHERS[launcher]
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    overrides = [*words, *LONG, "seed=1,2"]
    process = started_sweep(*overrides, folder=tmp_path)
    rounds = killed_in_the_middle(tmp_path / "sweep" / "0", process)
    assert process.wait(300) == 1
    told = (tmp_path / "sweep.log").read_text()
    assert jobs_of(tmp_path) == {"seed=1": "killed", "seed=2": "done"}
    assert "SIGKILL" in jobs_of(tmp_path, "message")["seed=1"] or launcher == "submitit_local"
    assert "1 killed, 1 done; resume=auto plays what is not done" in told
    assert told.count("failed jobs:") == 1
    other = contents(tmp_path / "sweep" / "1")

    again = finished_sweep(*overrides, "resume=auto", folder=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 done; written to" in again.stdout
    assert jobs_of(tmp_path) == {"seed=1": "done", "seed=2": "done"}
    assert rounds_of(tmp_path / "sweep" / "0") == list(range(1, 25))
    summary = json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())
    assert 1 <= summary["rounds_before"] <= rounds
    assert contents(tmp_path / "sweep" / "1") == other


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_jobs_end_with_their_sweep_and_leave_a_checkpoint(
    tmp_path: Path, launcher: str, number: int
) -> None:
    module, words = LAUNCHERS[launcher]
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    overrides = [*words, *LONG, "rounds=500", "checkpoint_every=0", "seed=1,2"]
    process = started_sweep(*overrides, folder=tmp_path)
    runs = [tmp_path / "sweep" / job for job in ("0", "1")[: 1 + (launcher != "basic")]]
    wait_until(lambda: all(len(lines(run / "metrics.jsonl")) >= 2 for run in runs), process)
    process.send_signal(number)
    assert process.wait(PATIENCE) in (-number, 128 + number)
    wait_until(lambda: not any(map(holder, runs)))
    assert all(any(run.glob("checkpoint_*.pt")) for run in runs)
