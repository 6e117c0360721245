"""Every launcher by real processes: a job that is killed in the middle costs no other, and the next
call finishes it.

Those that are not installed are skipped; Ray is one for an environment of its own.
"""

import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from esper_soa.lab.sweep.plugins import SUBMITIT, check_plugins, check_slurm, open_sweep_folder
from esper_soa.system.errors import UserError
from tests.builders.program import contents, wait_until
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_is_stopped_saves_the_job_in_progress(
    tmp_path: Path, number: int, status: int
) -> None:
    process = started_sweep(*LONG, "rounds=4000", "checkpoint_every=0", "seed=1,2", folder=tmp_path)
    run = tmp_path / "sweep" / "0"
    wait_until(lambda: len(rounds_of(run)) >= 1, process)
    os.kill(process.pid, number)
    assert process.wait(120) == status
    assert len(list(run.glob("checkpoint_*.pt"))) == 1
    assert jobs_of(tmp_path) == {"seed=1": "stopped", "seed=2": "not begun"}
    assert jobs_of(tmp_path, "message")["seed=1"] == f"stopped by {signal.Signals(number).name}"
    assert "Traceback" not in (tmp_path / "sweep.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_ends_with_a_checkpoint_where_the_sweep_is_killed(tmp_path: Path) -> None:
    process = started_sweep(*LONG, "rounds=4000", "checkpoint_every=0", "seed=1,2", folder=tmp_path)
    run = tmp_path / "sweep" / "0"
    wait_until(lambda: len(rounds_of(run)) >= 1, process)
    process.kill()
    process.wait()
    wait_until(lambda: holder(run) == 0)
    assert len(list(run.glob("checkpoint_*.pt"))) == 1


@pytest.mark.parametrize(
    ("chosen", "module", "extra"),
    [
        ("hydra/launcher=joblib", "hydra_plugins.hydra_joblib_launcher", "sweep"),
        (
            "+sweep=[seeds,submitit_local]",
            "hydra_plugins.hydra_submitit_launcher",
            "sweep",
        ),
        ("+sweep=slurm", "hydra_plugins.hydra_submitit_launcher", "sweep"),
        ("hydra/launcher=submitit_slurm", "hydra_plugins.hydra_submitit_launcher", "sweep"),
        ("+sweep=ray", "hydra_plugins.hydra_ray_launcher", "ray"),
        ("+sweep=[seeds,optuna]", "optuna", "sweep"),
        ("hydra/sweeper=optuna_search", "optuna", "sweep"),
    ],
)
def test_a_launcher_that_is_not_installed_is_refused_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, chosen: str, module: str, extra: str
) -> None:
    monkeypatch.setattr("esper_soa.lab.sweep.plugins.find_spec", lambda _: None)
    told = f"{module} is not installed. Install the extra: pip install 'esper-soa[{extra}]'"
    name = chosen.replace("[seeds,", "").rstrip("]")
    with pytest.raises(UserError, match=f"^{re.escape(f'{name}: {told}')}$"):
        check_plugins(["-m", "seed=1,2", chosen])
    check_plugins(["hydra/launcher=basic", "+sweep=gpus"])


@pytest.mark.parametrize(
    ("resume", "named", "told"),
    [
        ("", True, "resume='': must be auto with {}. {}"),
        ("auto", False, "run_dir='': must be a folder that all machines see with {}. {}"),
        ("auto", True, "{}: there is no sbatch here. Start the sweep on a machine of the cluster"),
    ],
)
def test_a_sweep_on_slurm_that_could_not_go_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, named: bool, told: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "A job that is preempted is started again and must find its folder."
    here, there = (
        OmegaConf.create({"launcher": {"_target_": f"{SUBMITIT}{launcher}Launcher"}})
        for launcher in ("Local", "Slurm")
    )
    check_slurm(here, named, resume)
    with pytest.raises(UserError) as caught:
        check_slurm(there, named, resume)
    assert str(caught.value) == told.format("hydra/launcher=submitit_slurm", reason)


def test_a_sweep_has_a_folder_of_its_name_and_goes_on_in_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = open_sweep_folder("", "mine", True)
    assert re.fullmatch(rf"{tmp_path}/runs/mine/sweep_[\d-]{{10}}_[\d-]{{8}}", str(first))
    for year in (1999, 2999):
        (first.parent / f"sweep_{year}-01-01_00-00-00").mkdir()
    assert open_sweep_folder("", "mine", True) == first.parent / "sweep_2999-01-01_00-00-00"
    other = open_sweep_folder("", "mine", False)
    assert other.is_dir()
    assert len([*first.parent.iterdir()]) == 4
    assert open_sweep_folder("to/be", "mine", True) == tmp_path / "to" / "be"
    assert (tmp_path / "to" / "be").is_dir()
