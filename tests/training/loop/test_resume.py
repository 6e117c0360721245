"""A run that was stopped, killed or refused: what goes on equals what was undisturbed."""

import random
import shutil
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from esper_soa.config.agent import PPOConfig
from esper_soa.config.env import EarlyStopConfig
from esper_soa.config.nets import DataConfig
from esper_soa.config.settings import TrainConfig, settings_from_yaml
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.system.errors import UserError
from esper_soa.system.signals import Interrupted
from esper_soa.system.versions import package_versions
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import SavedRun, SavedTask
from esper_soa.training.loop.recorder import Recorder
from esper_soa.training.loop.resume import (
    changes,
    check_settings,
    cut_back,
    drop_checkpoints,
)
from esper_soa.training.results.anomalies import WatchState
from esper_soa.training.results.totals import RunTotals
from tests.builders.equal_runs import ROUNDS, STEPS, assert_equal_runs, lines, settings
from tests.builders.lanes import some_of
from tests.builders.program import PATIENCE, TINY, command, contents, started, wait_until
from tests.builders.tiny_runs import fresh, log_of, records, resumed, signal_at


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
    saved = f"2 of {ROUNDS} rounds are saved. Go on with resume={tmp_path}"
    assert f"INFO {signal.Signals(number).name}: {saved}" in log_of(tmp_path)
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
    (tmp_path / "copy" / "log.txt").unlink()
    summary = resumed(settings(control="wait"), tmp_path / "copy")
    assert [line for line in log_of(tmp_path / "copy") if "resume   " in line] == [
        "INFO resume   checkpoint_000004.pt: 4 of 4 rounds are done",
        "INFO resume   changed control: none -> wait",
    ]
    again = settings(control="wait", resume="given")
    assert settings_from_yaml((tmp_path / "copy" / "config.yaml").read_text()) == again
    assert (
        summary.grown.figures["validation_accuracy"] == lines(undisturbed)[-1]["accuracy"]["mean"]
    )
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
    assert RunFolder(whole).answers.read_bytes() == RunFolder(parts).answers.read_bytes()
    assert len(summary.controls[0].episodes) == 2
    assert (summary.grown, summary.controls) == (undisturbed.grown, undisturbed.controls)
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
    free = (
        "name, device, run_dir, rounds, checkpoint_every, checkpoint_keep, control, "
        "control_budget, profile, report, resume, track, ranks, restarts, compute.workers, "
        "compute.threads, compute.env_chunk, compute.compile, compute.engine, "
        "compute.cuda_graphs, telemetry.*, data.name, data.root"
    )
    assert told == (
        "resume: these settings are not those of the checkpoint:\n"
        "  envs: 2 -> 3\n  policy.ppo.lr: 0.0003 -> 0.001\n"
        "  Repeat the overrides of the run; overrides.txt in its folder has them. "
        f"These may change: {free}."
    )
    with pytest.raises(
        UserError, match="^rounds=3: must be at least 4, which the checkpoint has done already$"
    ):
        resumed(settings(rounds=3), undisturbed)
    assert contents(undisturbed) == before


def saved_run(cfg: TrainConfig, **changed: object) -> SavedRun:
    """A checkpoint of 2 rounds on one task."""
    data = {"name": "own", "source": "own (there).", "identity": "abc"}
    tasks = {"tiny": SavedTask(RunTotals(rounds_done=2), data)}
    saved = SavedRun(tasks, asdict(cfg), package_versions(), WatchState(), 50.0, None)
    return replace(saved, **changed)  # type: ignore[arg-type]


def test_changes_are_those_of_what_was_there_and_of_todays_defaults() -> None:
    cfg = settings(rounds=3, resume="auto", run_dir="there", envs=3)
    old = asdict(cfg)
    del old["batch_size"], old["seed"]  # of a version that had no such settings
    old |= {"wings": 2, "envs": 2}
    other = TrainConfig().seed + 1
    assert changes(old, asdict(replace(cfg, seed=other))) == {
        "batch_size": f"{TrainConfig().batch_size} -> {cfg.batch_size}",
        "seed": f"{other - 1} -> {other}",
        "envs": "2 -> 3",
        "wings": "2 -> (absent)",
    }
    saved = saved_run(replace(cfg, rounds=2, resume="", run_dir="", device="cuda"))
    assert check_settings(saved, cfg) == [f"device: cuda -> {cfg.device}", "rounds: 2 -> 3"]
    assert check_settings(saved, replace(cfg, rounds=2)) == [f"device: cuda -> {cfg.device}"]
    with pytest.raises(
        UserError, match="^rounds=1: must be at least 2, which the checkpoint has done already$"
    ):
        check_settings(saved, replace(cfg, rounds=1))


def test_files_of_later_rounds_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    for rounds in (1, 2, 3, 10):
        folder.checkpoint(rounds).touch()
    folder.best.touch()
    drop_checkpoints(folder, 2)
    assert folder.checkpoints() == [folder.checkpoint(1), folder.checkpoint(2)]
    assert folder.best.exists()
    for path, count in ((folder.metrics, 1), (folder.episodes, 2)):
        line = "".join(f'{{"round":{number}}}\n' * count for number in (1, 2, 3))
        path.write_text(line)
    kept: list[int] = []
    recorder = Recorder()
    recorder.truncate = kept.append  # type: ignore[method-assign]
    cut_back(folder, 2, recorder)
    assert kept == [2]
    assert folder.metrics.read_text() == '{"round":1}\n{"round":2}\n'
    assert folder.episodes.read_text() == '{"round":1}\n' * 2 + '{"round":2}\n' * 2
    cut_back(folder, 3, recorder)
    dropped = (
        f"resume   checkpoint_{number}.pt is dropped: this run makes its rounds anew"
        for number in ("000003", "000010")
    )
    lacking = "resume   metrics.jsonl lacks rounds that the checkpoint has done"
    assert caplog.messages == [*dropped, lacking]
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(UserError) as caught:
        cut_back(folder, 3, recorder)
    problem = "cannot be written (Is a directory). Make room there"
    assert str(caught.value) == f"resume: {tmp_path} {problem}"


def test_a_line_that_was_cut_off_and_lines_after_the_checkpoint_are_written_anew(
    undisturbed: Path, tmp_path: Path
) -> None:
    fresh(settings(rounds=2), tmp_path)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"round":3,"env":0}\n{"round":4,"env')
    (tmp_path / f".esper_soa-{'0f' * 8}.tmp").write_bytes(b"half")
    resumed(settings(), tmp_path)
    assert_equal_runs(undisturbed, tmp_path)
    assert list(tmp_path.glob("*.tmp")) == []


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
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
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
