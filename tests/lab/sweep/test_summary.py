"""The table at the end of a sweep: what it is made of, and what it shows."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.conf import HydraConf
from omegaconf import OmegaConf
from rich.console import Console

from esper_soa.lab.sweep.records import JobRecord, Status, read_records, save_record
from esper_soa.lab.sweep.summary import end_sweep, list_jobs
from esper_soa.system.errors import UserError


def hydra_of(sweep: Path, *overrides: str, sweeper: str = "") -> HydraConf:
    """Hydra's configuration of a sweep in a folder."""
    basic = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    return OmegaConf.create(
        {
            "sweep": {"dir": str(sweep)},
            "overrides": {"task": list(overrides)},
            "sweeper": {"_target_": sweeper or basic, "params": {"seed": "1,2"}},
        }
    )


def test_a_record_is_read_as_it_was_kept(tmp_path: Path) -> None:
    record = JobRecord(3, ["a=[b]"], "folder").ended(Status.FAILED, None, "why\nnot")
    save_record(tmp_path, record)
    assert read_records(tmp_path, 3) == read_records(tmp_path) == {3: record}
    assert read_records(tmp_path, 4) == {}
    text = (tmp_path / ".jobs" / "3.json").read_text()
    assert json.loads(text) == vars(record)
    assert text.endswith("}\n")
    for number in (12, 10, 0, 11, 2):
        save_record(tmp_path, replace(record, number=number))
    assert [*read_records(tmp_path)] == [0, 2, 3, 10, 11, 12]


@pytest.mark.parametrize(
    "odd", [{"overrides": "ab"}, {"value": "x"}, {"number": True}, {"message": None}, {"wings": 1}]
)
def test_a_record_that_no_job_has_kept_is_refused_with_its_file(tmp_path: Path, odd: dict) -> None:
    save_record(tmp_path, JobRecord(3, [], "folder"))
    path = tmp_path / ".jobs" / "3.json"
    for text in (json.dumps(json.loads(path.read_text()) | odd), "{"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"3\.json: must be the record of a job"):
            read_records(tmp_path)


@pytest.mark.parametrize(
    "odd", [[], {"grown": 3}, {"grown": {"size": "x"}}, {"wall_seconds": float("nan")}]
)
def test_a_summary_that_no_run_has_written_is_left_out(tmp_path: Path, odd: object) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(odd))
    save_record(tmp_path, JobRecord(0, ["seed=1"], str(tmp_path)).ended(Status.DONE, 50.0))
    assert end_sweep(hydra_of(tmp_path, sweeper="another"), Console(file=io.StringIO()))
    (row,) = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [row[name] for name in ("net", "parameters", "seconds")] == [None] * 3


def test_jobs_are_those_of_the_sweep_begun_or_not_and_none_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    done = JobRecord(1, ["reward=shaped", "seed=2"], "there").ended(Status.DONE, 50.0)
    for record in (done, JobRecord(9, ["seed=9"], "there").ended(Status.FAILED)):
        save_record(tmp_path, record)
    listed = list_jobs(hydra_of(tmp_path, "reward=shaped,escrow"), tmp_path)
    # The sweep's own parameters come first, and so vary slowest; of job 1 it is the record.
    expected = [
        ["seed=1", "reward=shaped"],
        done.overrides,
        ["seed=2", "reward=shaped"],
        ["seed=2", "reward=escrow"],
    ]
    assert [job.overrides for job in listed] == expected
    assert [job.status for job in listed] == [
        Status.WAITING,
        Status.DONE,
        Status.WAITING,
        Status.WAITING,
    ]
    others = list_jobs(hydra_of(tmp_path, sweeper="another"), tmp_path)
    assert [job.number for job in others] == [1, 9]


def test_brackets_in_overrides_are_shown_and_what_is_not_done_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["slots=[r0c0]", "steps=3", "envs=2"]
    jobs = [JobRecord(n, [f"seed={n + 1}", *common], str(tmp_path / str(n))) for n in (0, 1)]
    first_again = replace(jobs[0], overrides=[*jobs[0].overrides, "resume=auto"])
    save_record(tmp_path, first_again.ended(Status.DONE, 12.345))
    for place in range(2):  # that of a job that was killed is an older one's
        (tmp_path / str(place)).mkdir()
        grown = {"validation_accuracy": 12.345, "test_accuracy": 10.0, "net": 9.25, "flop": 3.0}
        summary = {"grown": grown | {"size": 7000.4}, "wall_seconds": 65.0}
        (tmp_path / str(place) / "summary.json").write_text(json.dumps(summary))
    save_record(tmp_path, jobs[1].ended(Status.KILLED, None, "by\nSIGKILL"))
    shown = io.StringIO()
    hydra = hydra_of(tmp_path, sweeper="another")
    assert not end_sweep(hydra, Console(file=shown, width=100))
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert [line for line in lines if line.strip("─ ")] == [
        "jobs",
        "  job   overrides   status   validation %   less rent   parameters    time",
        "    0   seed=1      done            12.35       11.59        7,000   1m05s",
        "    1   seed=2      killed",
        f"1 done, 1 killed; resume=auto plays what is not done; written to {tmp_path}/sweep.json",
    ]
    told = "failed jobs:\n  #1 seed=2 slots=[r0c0] steps=3 envs=2: by SIGKILL\n"
    assert capsys.readouterr().err == told
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written["common"] == ["envs=2", "slots=[r0c0]", "steps=3"]
    # validation accuracy less the rent, which is what the test accuracy is above its net
    first = {"accuracy": 12.345, "net": 12.345 + 9.25 - 10.0, "parameters": 7000.4, "seconds": 65.0}
    head = {"job": 0, "overrides": ["seed=1"], "status": "done", "folder": str(tmp_path / "0")}
    assert written["jobs"][0] == head | first | {"message": ""}
    killed = {"job": 1, "overrides": ["seed=2"], "status": "killed", "message": "by\nSIGKILL"}
    unknown = dict.fromkeys(first) | {"folder": str(tmp_path / "1")}
    assert written["jobs"][1] == killed | unknown
    other = JobRecord(1, ["seed=2", "slots=[r1c1]", "q" * 150], str(tmp_path / "none"))
    for status, counts in ((Status.DONE, "2 done"), (Status.PRUNED, "1 done, 1 pruned")):
        save_record(tmp_path, other.ended(status, 1.0))
        shown = io.StringIO()
        assert end_sweep(hydra, Console(file=shown, width=100))
        assert "slots=[r1c1]" in shown.getvalue()
        assert shown.getvalue().count("q") == 150
        last = f"{counts}; written to {tmp_path}/sweep.json"
        assert (shown.getvalue().splitlines()[-1], capsys.readouterr().err) == (last, "")
    save_record(tmp_path, JobRecord(1, ["seed=2"], str(tmp_path / "1")))
    (tmp_path / "sweep.json").unlink()
    (tmp_path / "sweep.json").mkdir()
    shown = io.StringIO()
    assert not end_sweep(hydra, Console(file=shown, width=100))
    assert capsys.readouterr().err == "failed jobs:\n  #1 seed=2: has not come to its end\n"
    assert shown.getvalue().splitlines()[-1] == (
        "1 done, 1 begun; resume=auto plays what is not done; sweep.json could not be written (Is "
        "a directory)"
    )
