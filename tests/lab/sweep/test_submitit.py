"""Jobs by submitit, with a stand-in: what it is asked, and what is noted of jobs that it loses."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf

from esper_soa.lab.sweep import jobs
from esper_soa.lab.sweep.jobs import JobRecord, read_records, save_record

PLUGIN = "hydra_plugins.hydra_submitit_launcher"
OURS = "hydra_plugins.esper_soa_sweeps.submitit"
LOST = {4: type("FailedJobError", (Exception,), {})}
LOST |= dict.fromkeys((5, 6), type("UncompletedJobError", (Exception,), {}))
asked: list[object] = []


class Launcher:
    """A launcher of its plugin for Hydra: job 3 is done, 4 and 5 are lost, 6 had failed before."""

    _EXECUTOR = "slurm"
    params = {"submitit_folder": "logs", "timeout_min": 3, "partition": "gpu", "max_num_timeout": 2}

    def __init__(self, sweep: Path) -> None:
        self.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})

    def __call__(self, own: list[str], key: str, number: int, job: str, state: dict) -> None:
        assert (key, job, bool(state)) == ("hydra.sweep.dir", f"job_id_for_{number}", True)
        status = {3: jobs.DONE, 4: jobs.BEGUN, 6: jobs.FAILED}.get(number)
        if status is not None:
            save_record(Path(self.config.hydra.sweep.dir), JobRecord(number, own, "", status))
        if number in LOST:
            raise LOST[number]("two\nlines")


class AutoExecutor:
    """That of submitit, as far as it is asked here."""

    def __init__(self, folder: str, **given: object) -> None:
        asked[:] = [folder, given]

    def update_parameters(self, **given: object) -> None:
        asked.append(given)

    def map_array(self, call: Callable, *columns: tuple) -> list[SimpleNamespace]:
        shared = {"state": "LOST", "paths": SimpleNamespace(folder="/logs/77")}
        rows = zip(*columns, strict=True)
        return [SimpleNamespace(results=partial(call, *row), **shared) for row in rows]


MODULES = {
    "submitit": {"AutoExecutor": AutoExecutor},
    "submitit.core": {},
    "submitit.core.utils": {one.__name__: one for one in LOST.values()},
    PLUGIN: {},
    f"{PLUGIN}.config": {"BaseQueueConf": {"submitit_folder": "", "timeout_min": 60}},
    f"{PLUGIN}.submitit_launcher": dict.fromkeys(
        ("BaseSubmititLauncher", "LocalLauncher", "SlurmLauncher"), Launcher
    ),
}


@pytest.mark.parametrize("kind", ["LocalJobs", "SlurmJobs"])
def test_all_jobs_are_waited_for_and_what_is_lost_is_noted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    for name in (OURS, "esper_soa.lab.sweep.submitit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    overrides = [[f"seed={number}"] for number in range(3, 7)]
    returned = vars(sys.modules[OURS])[kind](tmp_path).launch(overrides, 3)
    assert [one.overrides for one in returned] == overrides
    limit = {"cluster": "slurm", "slurm_max_num_timeout": 2}
    assert asked == ["logs", limit, {"timeout_min": 3, "slurm_partition": "gpu"}]
    assert capsys.readouterr().out == "4 jobs are submitted; what they say is in /logs\n"
    lost = (jobs.KILLED, None, "ended by the system (LOST): two\\nlines")
    ends = {3: (jobs.DONE,), 4: lost, 5: lost, 6: (jobs.FAILED,)}
    assert read_records(tmp_path) == {
        number: JobRecord(number, [f"seed={number}"], "", *end) for number, end in ends.items()
    }
