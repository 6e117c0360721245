"""A run that was stopped, killed or refused: what goes on equals what was undisturbed."""

import json
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from equal_runs import ROUNDS, STEPS, assert_equal_runs, lines, settings
from lanes import some_of
from program import PATIENCE, TINY, command, contents, started, wait_until
from tiny_runs import fresh, records, resumed, run, signal_at

from esper_soa.config.agent import PPOConfig
from esper_soa.config.env import EarlyStopConfig
from esper_soa.config.errors import UserError
from esper_soa.config.nets import DataConfig
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.runtime.signals import Interrupted
from esper_soa.training.checkpoint import save_checkpoint
from esper_soa.training.run_folder import RunFolder
from esper_soa.training.start import resume_start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed")
    fresh(settings(), path)
    return path


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_run_stopped_in_mid_round_goes_on_as_if_undisturbed(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, number, report=2 * STEPS + 2)  # the second env-step of the third round
        with pytest.raises(Interrupted) as stop:
            fresh(settings(checkpoint_every=0), tmp_path)
    assert stop.value.status == 128 + number
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == ["checkpoint_000002.pt"]
    resumed(settings(), tmp_path)
    assert_equal_runs(undisturbed, tmp_path)


def test_a_run_stopped_in_its_first_round_goes_on_from_nothing(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, report=1)
        with pytest.raises(Interrupted):
            fresh(settings(), tmp_path)
    resumed(settings(), tmp_path)
    assert_equal_runs(undisturbed, tmp_path)


def test_sigusr2_in_mid_round_writes_a_checkpoint_and_goes_on(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGUSR2, report=2 * STEPS + 1)
        fresh(settings(checkpoint_every=0), tmp_path)
    assert [path.name for path in RunFolder(tmp_path).checkpoints()] == [
        "checkpoint_000002.pt",
        "checkpoint_000004.pt",
    ]
    assert_equal_runs(undisturbed, tmp_path)
    # going on from the earlier one makes the later rounds again, and drops what was there
    resumed(settings(), tmp_path, "checkpoint_000002.pt")
    assert_equal_runs(undisturbed, tmp_path)


def test_a_run_whose_episodes_end_early_goes_on_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in mid-round, when some envs' episodes are over and others' are not."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    cfg = settings(
        envs=4,
        steps=12,
        rounds=3,
        train_samples=8,
        val_samples=64,
        early_stop=EarlyStopConfig(patience=4, min_delta=0.0, min_steps=3),
        data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=64),
    )
    fresh(cfg, whole)
    ends = [line["env_steps"] for line in records(whole / "episodes.jsonl")]
    first = ends[:4]
    second = ends[4:8]
    assert min(second) < 7 <= max(second)
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, report=max(first) + 6)
        with pytest.raises(Interrupted):
            fresh(replace(cfg, checkpoint_every=0), parts)
    resumed(cfg, parts)
    assert_equal_runs(whole, parts, rounds=3)
    for name in ("steps", "slots", "events"):
        tables = [read_table(path, name) for path in (whole, parts)]
        assert {column: repr(values.tolist()) for column, values in tables[0].items()} == {
            column: repr(values.tolist()) for column, values in tables[1].items()
        }


def test_a_finished_run_resumes_to_its_table(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "copy")
    summary = resumed(settings(control="wait"), tmp_path / "copy")
    assert summary.grown.validation_accuracy == lines(undisturbed)[-1]["accuracy"]["mean"]
    assert summary.control is not None
    assert_equal_runs(undisturbed, tmp_path / "copy")


@pytest.mark.parametrize(
    "control", some_of(("static_final", "static_large", "heuristic"), "static_final")
)
def test_the_control_of_several_rounds_is_that_of_the_undisturbed_run_whenever_the_run_was_stopped(
    tmp_path: Path, control: str
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    asked = {"control": control, "control_rounds": 2, "rounds": 3, "steps": 8}
    undisturbed = fresh(settings("random", **asked), whole)
    fresh(settings("random", **(asked | {"rounds": 2, "control": "none"})), parts)
    summary = resumed(settings("random", **asked), parts)
    assert_equal_runs(whole, parts, rounds=3)
    assert summary.control is not None
    assert len(summary.control.episodes) == 2
    assert (summary.grown, summary.control) == (undisturbed.grown, undisturbed.control)
    with pytest.raises(UserError, match="control_rounds: 2 -> 4"):
        resumed(settings("random", **(asked | {"control_rounds": 4})), parts)


def test_a_change_that_matters_is_refused_with_old_and_new(undisturbed: Path) -> None:
    before = contents(undisturbed)
    changed = settings(
        envs=3, policy=replace(settings().policy, ppo=PPOConfig(epochs=2, lr=1e-3)), rounds=8
    )
    with pytest.raises(UserError) as refusal:
        resumed(changed, undisturbed)
    told = str(refusal.value)
    assert "  envs: 2 -> 3\n" in told
    assert "  policy.ppo.lr: 0.0003 -> 0.001\n" in told
    assert "  rounds:" not in told
    assert "These may change: name, device, run_dir, rounds," in told
    with pytest.raises(UserError, match="rounds=3: must be at least 4"):
        resumed(settings(rounds=3), undisturbed)
    assert contents(undisturbed) == before


def test_a_run_that_goes_on_with_another_engine_says_so(tmp_path: Path) -> None:
    with_torch = replace(settings().compute, engine="torch")
    fresh(settings("wait", rounds=1, compute=with_torch), tmp_path)
    assert json.loads((tmp_path / "versions.json").read_text())["kernels"]["engine"] == "torch"
    resumed(settings("wait", rounds=2, compute=with_torch), tmp_path)
    changed = (
        "resume   changed engine: torch -> native: results differ in rounding "
        "(compute.engine=torch asks for it "
    )
    assert changed not in (tmp_path / "log.txt").read_text()
    resumed(settings("wait", rounds=3, compute=replace(with_torch, engine="auto")), tmp_path)
    assert changed in (tmp_path / "log.txt").read_text()
    (tmp_path / "versions.json").write_text("{}")
    resumed(settings("wait", rounds=3, compute=with_torch), tmp_path)


def test_a_line_that_was_cut_off_and_lines_after_the_checkpoint_are_written_anew(
    undisturbed: Path, tmp_path: Path
) -> None:
    fresh(settings(rounds=2), tmp_path)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"round":3,"env":0}\n{"round":4,"env')
    (tmp_path / "checkpoint_000003.pt.123.tmp").write_bytes(b"half")
    resumed(settings(), tmp_path)
    assert_equal_runs(undisturbed, tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []


def test_auto_takes_the_newest_run_of_the_name_that_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resume_start("auto", "", "trial").folder.path.rmdir()
    names = (
        "2026-01-01_00-00-09",
        "2026-01-01_00-00-10",
        "2026-01-01_00-00-11",
        "sweep_2027-01-01",
    )
    older, newer, *_ = folders = [tmp_path / "runs" / "trial" / name for name in names]
    for folder in folders:
        folder.mkdir()
    for name in ("checkpoint_000009.pt", "checkpoint_000010.pt"):
        save_checkpoint(older / name, {})
        save_checkpoint(newer / name, {})
    start = resume_start("auto", "", "trial")
    assert start == (RunFolder(newer), newer / "checkpoint_000010.pt")


def test_auto_takes_a_folder_whose_run_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round":1}\n')
    start = resume_start("auto", str(tmp_path), "trial")
    assert start == (RunFolder(tmp_path), None)
    run(settings("wait", rounds=1, steps=1, resume="auto"), start.folder, start.checkpoint)
    (line,) = lines(tmp_path)
    assert line["env_steps"] == 2


@pytest.mark.parametrize("resume", ["nowhere", "nowhere/checkpoint_000001.pt", "."])
def test_a_resume_that_leads_nowhere_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"resume={resume}: there is no"):
        resume_start(resume, "", "trial")


SMALL = [*TINY, f"rounds={ROUNDS}", "control=none", "checkpoint_every=1", "telemetry.progress=off"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # twelve starts of the program
def test_killed_at_random_moments_and_resumed_it_equals_the_undisturbed_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    begun = time.monotonic()
    on_the_way = command(*SMALL, f"run_dir={killed}", "resume=auto")
    asked = {"check": True, "capture_output": True, "timeout": 300}
    subprocess.run(command(*SMALL, f"run_dir={whole}"), **asked)
    length = time.monotonic() - begun
    chance = random.Random(7)
    for _ in range(10):
        process = subprocess.Popen(on_the_way, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.5, 1.0) * length)
        process.kill()
        process.wait()
    subprocess.run(on_the_way, **asked)
    assert_equal_runs(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_entry_point_ends_with_the_status_of_the_signal_and_leaves_a_checkpoint(
    tmp_path: Path, number: int, status: int
) -> None:
    process = started(*SMALL, "rounds=500", f"run_dir={tmp_path}", folder=tmp_path)
    wait_until(lambda: bool(RunFolder(tmp_path).checkpoints()), process)
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert told == f"stopped by {signal.Signals(number).name}\n"
    done = RunFolder(tmp_path).checkpoints()[-1]
    assert len(lines(tmp_path)) == int(done.stem.removeprefix("checkpoint_"))
