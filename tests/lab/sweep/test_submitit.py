"""Jobs by submitit, with a stand-in: what it is asked, and what is noted of jobs that it loses."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf

from esper_soa.lab.sweep.jobs import (
    BEGUN,
    DONE,
    FAILED,
    KILLED,
    JobRecord,
    read_records,
    save_record,
)

SUBMITIT = "hydra_plugins.hydra_submitit_launcher"
OURS = "hydra_plugins.esper_soa_sweeps.submitit"


class FailedJobError(Exception):
    """Of submitit: a job has raised, or left no result."""


class UncompletedJobError(Exception):
    """Of submitit: a job was ended by the system."""


@dataclass
class BaseQueueConf:
    """What all of submitit's launchers take."""

    submitit_folder: str = ""
    timeout_min: int = 60


class Launcher:
    """A launcher of its Hydra plugin; it plays the jobs 3 to 6, each with another end."""

    _EXECUTOR = "slurm"

    def __init__(self, sweep: Path) -> None:
        self.params = {"submitit_folder": "logs", "timeout_min": 3, "partition": "gpu"}
        self.params["max_num_timeout"] = 2  # type: ignore[assignment]
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})
        self.sweep = sweep

    def __call__(self, own: list[str], key: str, number: int, job: str, state: dict) -> None:
        assert (key, job) == ("hydra.sweep.dir", f"job_id_for_{number}")
        assert state
        status = {3: DONE, 4: BEGUN, 6: FAILED}.get(number)
        if status is not None:
            save_record(self.sweep, JobRecord(number, own, "", status))
        if number > 3:
            raise (FailedJobError if number == 4 else UncompletedJobError)("two\nlines")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the stand-in is asked."""
    told: list[object] = []

    class AutoExecutor:
        def __init__(self, folder: str, **given: object) -> None:
            told.append((folder, given))

        def update_parameters(self, **given: object) -> None:
            told.append(given)

        def map_array(self, call: Callable, *columns: tuple) -> list[SimpleNamespace]:
            paths = SimpleNamespace(folder="/logs/77")
            rows = [partial(call, *row) for row in zip(*columns, strict=True)]
            return [SimpleNamespace(results=row, state="LOST", paths=paths) for row in rows]

    modules = {
        "submitit": {"AutoExecutor": AutoExecutor},
        "submitit.core": {},
        "submitit.core.utils": {one.__name__: one for one in (FailedJobError, UncompletedJobError)},
        SUBMITIT: {},
        f"{SUBMITIT}.config": {"BaseQueueConf": BaseQueueConf},
        f"{SUBMITIT}.submitit_launcher": dict.fromkeys(
            ("BaseSubmititLauncher", "LocalLauncher", "SlurmLauncher"), Launcher
        ),
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in (OURS, "esper_soa.lab.sweep.submitit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    return told


@pytest.mark.parametrize("kind", ["LocalJobs", "SlurmJobs"])
def test_all_jobs_are_waited_for_and_what_is_lost_is_noted(
    tmp_path: Path, asked: list[object], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    jobs = [[f"seed={number}"] for number in range(3, 7)]
    launcher = vars(sys.modules[OURS])[kind](tmp_path)
    returned = launcher.launch(jobs, 3)
    assert [one.overrides for one in returned] == jobs
    assert asked == [
        ("logs", {"cluster": "slurm", "slurm_max_num_timeout": 2}),
        {"timeout_min": 3, "slurm_partition": "gpu"},
    ]
    assert capsys.readouterr().out == "4 jobs are submitted; what they say is in /logs\n"
    lost = "ended by the system (LOST): two\\nlines"
    ends = {3: (DONE, ""), 4: (KILLED, lost), 5: (KILLED, lost), 6: (FAILED, "")}
    assert read_records(tmp_path) == {
        number: JobRecord(number, [f"seed={number}"], "", status, None, message)
        for number, (status, message) in ends.items()
    }
