"""A job in a process of its own: how it ends is noted, signals reach it, and it ends with whoever
waits for it. What is played here are functions of Python.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.paths import config_dir
from esper_soa.config.settings import EvaluateConfig, TrainConfig, register_schema
from esper_soa.lab.sweep import jobs
from esper_soa.lab.sweep.jobs import watch
from esper_soa.lab.sweep.plugins import PLUGIN_PACKAGE, check_job, sweep_folder
from esper_soa.lab.sweep.records import JobRecord, Status, read_records, save_record
from esper_soa.system.errors import PrunedError, UserError
from esper_soa.system.signals import Interrupted
from tests.builders.program import wait_until

LONG = 20  # seconds of a job that must not come to its end


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """A job that has begun here, of a sweep in `tmp_path`."""
    register_schema()
    context = {"job.num": 0, "runtime.output_dir": tmp_path, "runtime.cwd": tmp_path}
    context |= {"sweep.dir": tmp_path}
    with hydra.initialize_config_dir(config_dir(), **INITIALIZE):
        composed = hydra.compose("train", return_hydra_config=True)
    OmegaConf.set_readonly(composed.hydra, False)
    for key, value in context.items():
        OmegaConf.update(composed.hydra, key, value if key == "job.num" else str(value))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", composed)
    begun = JobRecord(0, [], str(tmp_path))
    save_record(tmp_path, begun)
    return begun


def test_a_job_that_is_killed_is_noted_as_such(
    job: JobRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task kills the process of the job, once it has noted its folder and session."""
    words = "pwd > place; echo $PPID > process; cut -d' ' -f6 /proc/$PPID/stat > session"
    assert watch(subprocess.call, ["sh", "-c", f"{words}; kill -9 $PPID"], tmp_path, job) is None
    told = "its process was ended by SIGKILL"
    assert read_records(tmp_path) == {0: job.ended(Status.KILLED, None, told)}
    assert capsys.readouterr().err == f"error: job 0: {told}\n"
    place, process, session = (
        (tmp_path / name).read_text().strip() for name in ("place", "process", "session")
    )
    assert (place, process) == (str(tmp_path), session), "of its own"


def test_a_job_begins_with_a_record_and_mistakes_are_recorded(
    job: JobRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = HydraConfig.get()
    context.launcher["_target_"] = f"{PLUGIN_PACKAGE}.submitit.LocalJobs"
    begun = []

    def task(composed: object) -> float:
        begun.append(read_records(tmp_path)[0].status)
        return 50.5

    (tmp_path / ".jobs" / "0.json").unlink()
    composed = OmegaConf.structured(TrainConfig())
    assert jobs.run_job(task, composed) == 50.5
    assert (begun, read_records(tmp_path)) == ([Status.BEGUN], {0: job.ended(Status.DONE, 50.5)})
    evaluation = OmegaConf.structured(EvaluateConfig(checkpoint="run"))
    assert jobs.run_job(task, evaluation) == 50.5
    composed.run_dir = "elsewhere"
    evaluation.envs = -1
    for wrong, told in ((composed, "run_dir=elsewhere: the folders of"), (evaluation, "envs=-1: ")):
        assert jobs.run_job(task, wrong) is None
        record = read_records(tmp_path)[0]
        assert (record.status, record.message[: len(told)]) == (Status.FAILED, told)
        assert capsys.readouterr().err == f"error: {record.message}\n"
    assert len(begun) == 2


def test_a_job_that_ends_without_a_word_is_told_with_its_status(
    job: JobRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = subprocess.Popen
    command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda _, **given: start(command, **given))
    assert watch(print, None, tmp_path, job) is None
    told = "its process was ended with status 3"
    assert read_records(tmp_path)[0].message == told
    assert capsys.readouterr().err == f"error: job 0: {told}\n"


def test_a_signal_reaches_the_job_and_ends_the_sweep(job: JobRecord, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted):
        watch(time.sleep, LONG, tmp_path, job)
    assert "SIGTERM" in read_records(tmp_path)[0].message


def test_a_job_ends_where_nobody_waits_for_it_any_more(job: JobRecord, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "esper_soa.lab.sweep.jobs"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        context = OmegaConf.to_container(HydraConfig.get(), resolve=False)
        started = tmp_path / "started"
        waits = ["sh", "-c", f"touch {started}; exec sleep {LONG}"]
        process.stdin.write(pickle.dumps((subprocess.call, waits, context)))
        process.stdin.flush()
        wait_until(started.exists)
        process.stdin.close()
    assert read_records(tmp_path)[0].status == Status.STOPPED


@pytest.mark.parametrize(
    ("comes", "status", "value", "message"),
    [
        (50.5, Status.DONE, 50.5, ""),
        (PrunedError(3, 41.25), Status.PRUNED, 41.25, "pruned after 3 rounds at 41.25 % accuracy"),
        (UserError("why\nnot"), Status.FAILED, None, "why not"),
        (KeyError("x"), Status.FAILED, None, "KeyError: 'x'"),
        (Interrupted(signal.SIGTERM), Status.STOPPED, None, "stopped by SIGTERM"),
        (SystemExit(7), Status.STOPPED, None, "stopped by the launcher"),
    ],
)
def test_what_a_job_comes_to_is_recorded(
    job: JobRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    comes: float | BaseException,
    status: str,
    value: float | None,
    message: str,
) -> None:
    def task(composed: object) -> float:
        if isinstance(comes, BaseException):
            raise comes
        return comes

    monkeypatch.setattr(jobs, "pruner", lambda composed: ())
    composed = OmegaConf.create({})
    if isinstance(comes, SystemExit | KeyError):
        with pytest.raises(type(comes)):
            jobs.run_here(task, composed)
    else:
        assert jobs.run_here(task, composed) == value
    assert read_records(tmp_path) == {0: job.ended(status, value, message)}
    pruned = f"job 0 is {message}\n" * (status == Status.PRUNED)
    told = "error: why\nnot\n" * isinstance(comes, UserError)
    assert capsys.readouterr() == (pruned, told)


@pytest.mark.parametrize("status", [Status.PRUNED, Status.FAILED])
def test_a_job_that_has_ended_is_not_played_again(
    job: JobRecord,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
) -> None:
    composed = OmegaConf.create({})
    before = job.ended(status, 40.0, "pruned after 3 rounds")
    accuracy: float | None = 51.0
    goes_on = True
    monkeypatch.setattr(jobs, "job_settings", lambda composed: TrainConfig())
    monkeypatch.setattr(jobs, "check_job", lambda hydra, settings: None)
    monkeypatch.setattr(jobs, "finished_accuracy", lambda folder, settings: accuracy)
    monkeypatch.setattr(jobs, "resumes", lambda folder, settings: goes_on)
    assert jobs.finished_record(composed, job, None) == job.ended(Status.DONE, 51.0)
    assert jobs.finished_record(composed, job, before) == job.ended(Status.DONE, 51.0)
    accuracy = None
    assert jobs.finished_record(composed, job, None) is None
    found = jobs.finished_record(composed, job, before)
    assert found == (before if status == Status.PRUNED else None)
    done = f"job 0 is done already: {job.folder}\n"
    pruned = f"job 0 was pruned after 3 rounds: {job.folder}\n"
    assert capsys.readouterr().out == 2 * done + pruned * (status == Status.PRUNED)
    goes_on = False
    assert jobs.finished_record(composed, job, before) is None


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ID", "RESTART_COUNT"):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", "0")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    told = "a sweep cannot be started by torchrun, each process of which would start it"
    with pytest.raises(UserError, match=rf"^{told}\. Give ranks=K$"):
        sweep_folder(OmegaConf.create({"resume": ""}))


def test_a_job_of_a_sweep_has_neither_a_folder_nor_a_checkpoint_of_its_own(
    job: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = HydraConfig.get()
    ranks = TrainConfig(ranks=2)
    monkeypatch.chdir(tmp_path)
    here = (TrainConfig(resume="auto", run_dir=place) for place in (str(tmp_path), "."))
    for allowed in (TrainConfig(), *here, ranks):
        check_job(context, allowed)
    for cfg, told in (
        (
            TrainConfig(resume="there"),
            (
                r"^resume=there: must be auto, as the jobs of a sweep cannot share a "
                r"checkpoint\.$"
            ),
        ),
        (
            TrainConfig(run_dir=str(tmp_path / "0")),
            (
                r"^run_dir=/.*/0: the folders of this sweep are in /.*\. Give run_dir one "
                r"value, or set hydra\.sweep\.dir and hydra\.sweep\.subdir$"
            ),
        ),
    ):
        with pytest.raises(UserError, match=told):
            check_job(context, cfg)
    OmegaConf.update(context, "sweeper._target_", f"{PLUGIN_PACKAGE}.search.OptunaSweeper")
    OmegaConf.update(context, "sweeper.pruner", "median", force_add=True)
    told = (
        "hydra.sweeper.pruner=median: must be none with ranks=2. The processes of a run cannot be "
    )
    told += "ended by what one of them is told."
    with pytest.raises(UserError, match=told):
        check_job(context, ranks)
    check_job(context, TrainConfig())
    OmegaConf.update(context, "sweeper.pruner", "none")
    check_job(context, ranks)
