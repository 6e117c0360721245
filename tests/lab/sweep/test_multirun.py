"""Sweeps by real processes: all jobs run, failed ones are named, Hydra's folders are the runs'."""

import json
import pickle
from functools import partial
from pathlib import Path

import pytest

from esper_soa.lab.sweep.jobs import run_job
from esper_soa.training.start.command import job
from tests.builders.program import TINY, contents, finished

pytestmark = pytest.mark.timeout(900)

ONE = [*TINY, "rounds=1", "control=none", "report=false", "telemetry.progress=off"]
SWEEP = ["-m", *ONE, "seed=${modulo:7,4}", "envs=0,2", "reward=glob(ne*)"]


class Swept:
    """A sweep whose first job cannot work, and the same once more with resume=auto."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first = finished(*SWEEP, folder=folder)
        (self.sweep,) = (folder / "runs" / "smoke").iterdir()
        self.written = json.loads((self.sweep / "sweep.json").read_text())
        self.before = contents(self.sweep / "1")
        self.again = finished(*SWEEP, "resume=auto", folder=folder)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    return Swept(tmp_path_factory.mktemp("sweep"))


def test_a_sweep_ends_with_a_table_of_all_its_jobs(swept: Swept) -> None:
    table = swept.first.stdout.split("\njobs ")[1].splitlines()
    rows = [line.split() for line in table[4:-2]]
    assert [row[1:3] for row in rows] == [["envs=0", "failed"], ["envs=2", "done"]]
    assert table[-1].startswith("1 failed, 1 done; resume=auto plays what is not done; written to ")
    common = {"+experiment=smoke", "rounds=1", "control=none", "reward=net"}
    assert common < set(swept.written["common"])
    jobs = swept.written["jobs"]
    assert [job["overrides"] for job in jobs] == [["envs=0"], ["envs=2"]]
    assert [job["status"] for job in jobs] == ["failed", "done"]
    grown = json.loads((swept.sweep / "1" / "summary.json").read_text())["grown"]
    seen = grown["validation_accuracy"]
    rent = grown["test_accuracy"] - grown["net"]
    told = [seen, pytest.approx(seen - rent), grown["size"]]
    assert [jobs[1][key] for key in ("accuracy", "net", "parameters")] == told
    assert rows[1][3:6] == [f"{seen:.2f}", f"{seen - rent:.2f}", f"{grown['size']:,.0f}"]
    again = swept.again.stdout.split("\njobs ")[1].splitlines()
    assert [line.split() for line in again[:-1]] == [line.split() for line in table[:-1]]


def test_the_folders_of_hydra_are_those_of_the_jobs(swept: Swept) -> None:
    assert [path.name for path in swept.folder.iterdir()] == ["runs"]
    names = sorted(path.name for path in swept.sweep.iterdir())
    assert names == [".jobs", ".lock", "0", "1", "multirun.yaml", "sweep.json"]
    records = swept.sweep / "1" / ".hydra"
    names = sorted(path.name for path in records.iterdir())
    assert names == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert "- envs=2\n" in (records / "overrides.yaml").read_text()
    of_hydra = (records / "hydra.yaml").read_text()
    assert of_hydra.startswith("hydra:\n")
    assert f"output_dir: {swept.sweep / '1'}\n" in of_hydra
    assert "envs: 2\n" in (records / "config.yaml").read_text()
    assert "\nseed: 3\n" in (swept.sweep / "1" / "config.yaml").read_text()  # in its own process
    assert list((swept.sweep / "0").iterdir()) == []  # no settings, no run


def test_a_sweep_that_goes_on_leaves_its_finished_jobs_alone(swept: Swept) -> None:
    assert swept.again.returncode == 1
    assert [path.name for path in swept.sweep.parent.iterdir()] == [swept.sweep.name]
    assert f"job 1 is done already: {swept.sweep / '1'}\n" in swept.again.stdout
    assert contents(swept.sweep / "1") == swept.before


@pytest.mark.slow
def test_a_sweep_that_goes_on_plays_what_is_left_and_refuses_what_has_changed(swept: Swept) -> None:
    own = ["-m", *ONE, "seed=3", "resume=auto"]
    there = f"run_dir={swept.sweep}"
    done = finished(*own, "envs=3,2", "rounds=2", there, folder=swept.folder)
    assert done.returncode == 0, done.stderr
    assert len((swept.sweep / "1" / "metrics.jsonl").read_text().splitlines()) == 2
    changed = finished(*own, "envs=2,4", f"hydra.sweep.dir={swept.sweep}", folder=swept.folder)
    assert changed.returncode == 1
    assert "#1 " in changed.stderr
    assert "envs: 2 -> 4" in changed.stderr


@pytest.mark.slow
def test_folders_that_are_given_to_hydra_are_taken(tmp_path: Path) -> None:
    there = "hydra.job.chdir=true"  # changes no path
    assert finished(*ONE, there, "hydra.run.dir=mine/${name}", folder=tmp_path).returncode == 0
    swept = ("hydra.sweep.dir=sweep", "hydra.sweep.subdir=envs_${envs}", there)
    swept = (*swept, "policy.init=mine/smoke", "policy.name=ppo")
    assert finished("-m", *ONE, "envs=1,2", *swept, folder=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "sweep"]
    for folder in ("mine/smoke", "sweep/envs_1", "sweep/envs_2"):
        assert (tmp_path / folder / "summary.json").exists()
        assert (tmp_path / folder / ".hydra" / "hydra.yaml").exists()


def test_what_a_launcher_sends_to_its_processes_can_be_sent() -> None:
    sent = pickle.loads(pickle.dumps(partial(run_job, job)))
    assert (sent.func, sent.args) == (run_job, (job,))
