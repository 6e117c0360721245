"""Ranks: envs shared out over processes play and learn what one does, and survive each other."""

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.runtime.ranks import core_group, keep_to_cores, share_of
from esper_soa.system.errors import RankLostError, SettingError, UserError
from esper_soa.system.signals import Interrupted
from esper_soa.training.files.checkpoint import load_checkpoint
from esper_soa.training.files.claims import lock_folder
from esper_soa.training.files.run_folder import RunFolder, rounds_of
from esper_soa.training.files.session import session
from esper_soa.training.start import launch
from esper_soa.training.start.begin import LaunchedRank, launched_rank, make_run_folder
from esper_soa.training.start.launch import (
    check_devices,
    train_in_session,
)
from tests.builders import warm
from tests.builders.equal_runs import same
from tests.builders.program import (
    ENVIRONMENT,
    OURS,
    PATIENCE,
    command,
    finished,
    lines,
    started,
    wait_until,
)
from tests.builders.tiny_runs import run, settings

pytestmark = pytest.mark.timeout(900)
CPU = torch.device("cpu")
# Five tiny hosts in five minibatches, so that no number of ranks divides them and some ranks have
# none of a minibatch.
RUN = shlex.split(
    "+experiment=smoke envs=5 rounds=2 steps=6 train_samples=16 val_samples=8 batch_size=8 "
    "data.synthetic_train=128 data.synthetic_test=64 compute.threads=1 checkpoint_every=1 "
    "checkpoint_keep=99 report=false device=cpu policy.ppo.minibatches=5 policy.ppo.target_kl=0"
)
TIMINGS = {"eps", "collect_seconds", "update_seconds"}
LONG = [*RUN, "rounds=60", "control=none"]


def played(folder: Path, *overrides: str, rounds: int = 2) -> Path:
    """The folder of a run that has ended."""
    path = folder / "run"
    done = finished(*RUN, f"run_dir={path}", f"rounds={rounds}", *overrides, folder=folder)
    assert done.returncode == 0, done.stderr
    return path


def played_under_torchrun(folder: Path) -> Path:
    """The folder of a run of two ranks that are there already, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    given = f"""WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}
        TORCHELASTIC_RUN_ID=test TORCHELASTIC_RESTART_COUNT=0 GLOO_SOCKET_IFNAME=lo"""
    words = command(*RUN, "ranks=2", f"run_dir={folder / 'run'}")
    ranks = []
    for rank in "01":
        environment = ENVIRONMENT | dict(one.split("=") for one in given.split())
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        pipe = subprocess.PIPE
        ranks.append(warm.Popen(words, cwd=folder, env=environment, stderr=pipe, stdout=pipe))
    try:
        for process in ranks:
            _, told = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, told.decode()
    finally:
        for process in ranks:
            process.kill()
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds in one process."""
    return played(tmp_path_factory.mktemp("alone"))


def table(run: Path, name: str, number: int) -> dict[str, list]:
    """A table of round `number`, by column, without what the policy's own rounding shows in."""
    columns = parquet.read_table(run / "telemetry" / name / f"round_{number:06d}.parquet")
    return {
        column: repr(values)
        for column, values in columns.to_pydict().items()
        if not column.endswith(("value", "probability"))
    }


def agree(one: Path, other: Path, rounds: range) -> None:
    """Actions, rewards and hosts to the bit, the policy and its diagnostics within rounding."""
    assert (one / "episodes.jsonl").read_text() == (other / "episodes.jsonl").read_text()
    for number in rounds:
        for name in ("steps", "slots", "events"):
            assert table(one, name, number) == table(other, name, number), (name, number)
        saved = [
            load_checkpoint(RunFolder(path).checkpoint(number), CPU)["learner"]
            for path in (one, other)
        ]
        if saved[0] is not None:
            torch.testing.assert_close(saved[1]["policy"], saved[0]["policy"], rtol=1e-4, atol=1e-5)
            same(saved[1]["reward"], saved[0]["reward"])
    records = [
        [flat_settings(json.loads(line)) for line in lines(path / "metrics.jsonl")]
        for path in (one, other)
    ]
    for mine, theirs in zip(*records, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - TIMINGS:
            wanted = mine[name]
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)
            assert theirs[name] == wanted, name


def end_alike(one: Path, other: Path) -> None:
    """Hosts at the end, their answers and figures, to the bit."""
    summaries = [json.loads((path / "summary.json").read_text()) for path in (one, other)]
    for part in ("grown", "controls"):
        assert summaries[0][part] == summaries[1][part]
    answers = [RunFolder(path).answers.read_bytes() for path in (one, other)]
    assert answers[0] == answers[1]
    for name in ("best", "hosts"):
        files = [RunFolder(path).network_files(name) for path in (one, other)]
        assert [path.name for path in files[0]] == [path.name for path in files[1]]
        assert files[0][-1].read_bytes() == files[1][-1].read_bytes()


@pytest.mark.slow  # test_ranks_that_are_started_again_... is the cheap twin
def test_two_ranks_play_and_learn_what_one_process_does(alone: Path, tmp_path: Path) -> None:
    shared = played_under_torchrun(tmp_path)
    agree(alone, shared, range(1, 3))
    end_alike(alone, shared)
    assert "ranks: 2" in lines(shared / "config.yaml")


def test_shares_are_neighbours_and_differ_by_one_env_at_most() -> None:
    for num_envs, count in ((5, 2), (5, 3), (8, 4), (4, 4)):
        shares = [share_of(num_envs, count, rank) for rank in range(count)]
        assert [env for share in shares for env in share] == list(range(num_envs))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert share_of(5, 3, 0) == range(0, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 9}, r"^ranks=9: .*envs=8"),
        ({"ranks": 0}, r"^ranks=0: must be in \[1, 65536\] \(at most envs\)\.$"),
        (
            {"ranks": 2, "device": "cuda:1"},
            "^device=cuda:1: .*ranks=2",
        ),
        (
            {"restarts": 1},
            "^restarts=1: .*ranks=1",
        ),
        (
            {"ranks": 2, "profile": "phases"},
            "^profile=phases: .*ranks=2",
        ),
    ],
)
def test_what_ranks_cannot_have_is_refused(changed: dict, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        replace(TrainConfig(), **changed)


def test_there_is_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cuda", 3, 2)  # here, of three on several machines
    told = (
        r"^ranks=3: must be such that a machine has at most 2, the GPUs of this one\. device=cpu "
        r"takes the CPU's cores instead\.$"
    )
    with pytest.raises(SettingError, match=told):
        check_devices("cuda", 3, 3)
    with pytest.raises(SettingError, match="^ranks=65536: "):
        check_devices("cpu", 65536, 65536)


def test_a_program_that_plays_a_run_itself_is_told_that_it_is_one_rank(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"^ranks=2: must be 1 here\. esper-train starts ranks\.$"
    ):
        run(replace(TrainConfig(), ranks=2), RunFolder(tmp_path))


def test_a_launched_rank_is_what_its_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    given |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "launch"}
    monkeypatch.chdir(tmp_path)
    cfg = TrainConfig(name="trial")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == LaunchedRank(
        rank=5, processes=8, local_rank=1, local_processes=4, restarts=2, run_id="launch"
    )
    for _ in range(2):  # a folder that is there is that of this launch
        assert make_run_folder(cfg, "").path == tmp_path / "runs" / "trial" / "launch"
        assert make_run_folder(cfg, "own").path == tmp_path / "own"
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        with monkeypatch.context() as less:
            less.delenv(name)
            assert launched_rank() is None


def test_ranks_that_cannot_be_reached_are_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "RANK_TIMEOUT", timedelta(seconds=1))
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "keep_to_cores", lambda *given: kept.append(given))
    rank = LaunchedRank(3, 4, local_rank=1, local_processes=2, restarts=0, run_id="")
    cfg = settings(envs=4, ranks=4)
    with session(RunFolder(tmp_path)) as opened, pytest.raises(RankLostError, match=r"torchrun"):
        launch.run_rank(opened, cfg, None, rank, "tcp://127.0.0.1:9")
    assert kept == [(1, 2)], "of its machine, the second of two"


def test_cores_are_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 5, 6})
    groups = [core_group(rank, 2) for rank in range(2)]
    assert groups == [[0, 2], [3, 5, 6]]
    assert [core_group(rank, 7) for rank in (0, 3, 6)] == [[0], [3], [6]]
    kept: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: kept.append(given))
    keep_to_cores(1, 2)
    assert kept == [(0, [3, 5, 6])]


def launched(folder: Path, *overrides: str, ranks: int = 2) -> float:
    """The accuracy that a run of ranks which this process launches comes to."""
    words = [*RUN[1:], *overrides, f"ranks={ranks}", "control=none", "steps=3"]
    folder.mkdir()
    with session(RunFolder(folder), 0) as opened:
        return train_in_session(opened, compose_settings("smoke", words), None)


@pytest.fixture
def _forked_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's launcher starts ranks as warm.py does, and leaves no file of its own behind."""

    def start(args: tuple[str, ...], env: dict[str, str], **given: object) -> subprocess.Popen:
        assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # no port is opened
        plain = {name: text for name, text in env.items() if not name.startswith("TORCH_")}
        return warm.Popen(args, env=plain | OURS, **given)

    monkeypatch.setattr(subprocess_handler, "Popen", start)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert {path.name for path in tmp_path.iterdir()} <= {"one", "two", "run"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ
    log = logging.getLogger("torch.distributed.elastic")
    assert (log.propagate, log.handlers) == (True, [])


@pytest.mark.usefixtures("_forked_ranks")
def test_ranks_that_are_started_again_where_one_is_killed_come_to_what_one_process_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = "policy.name=parts_of_users:fateful", "rounds=2"
    launched(tmp_path / "one", *words, ranks=1)
    monkeypatch.setenv("FATE", "end")
    accuracy = launched(tmp_path / "two", *words, "restarts=1")
    agree(tmp_path / "one", tmp_path / "two", range(1, 3))
    end_alike(tmp_path / "one", tmp_path / "two")
    written = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert written["grown"]["validation_accuracy"] == accuracy
    assert written["rounds_before"] == 1
    log = (tmp_path / "two" / "log.txt").read_text()
    assert "WARNING ranks    all 2 were started again, for the 1. time\n" in log
    assert "resume   checkpoint_000001.pt: 1 of 2 rounds are done" in log
    assert capfd.readouterr().out == ""
    assert not [one for one in caplog.records if one.name.startswith("torch.distributed.elastic")]


@pytest.mark.usefixtures("_forked_ranks")
def test_a_signal_to_the_launcher_stops_ranks_with_a_checkpoint_also_where_one_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATE", str(tmp_path / "run"))
    words = "policy.name=parts_of_users:fateful", "rounds=99", "checkpoint_every=0"
    with pytest.raises(Interrupted) as stopped:
        launched(tmp_path / "run", *words)
    assert stopped.value.status == 143
    assert time.time() - (tmp_path / "run" / "frozen").stat().st_mtime < 20
    (kept,) = RunFolder(tmp_path / "run").checkpoints()
    assert rounds_of(kept) == len(lines(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.usefixtures("_forked_ranks")
def test_a_mistake_that_ranks_find_is_that_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^val_samples=4096: must be at most 64"):
        launched(tmp_path / "run", "val_samples=4096")


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that a command has started, by rank."""
    found = {}
    for task in Path(f"/proc/{launcher.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = next((one[5:] for one in environment if one.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank)] = int(child)
    return found


def begun(folder: Path, *overrides: str, rounds: int = 3) -> tuple[subprocess.Popen[str], Path]:
    """A long run of two ranks that has done so many rounds, and its folder."""
    path = folder / "run"
    process = started(*LONG, "ranks=2", f"run_dir={path}", *overrides, folder=folder)
    wait_until(lambda: len(lines(path / "metrics.jsonl")) >= rounds, process)
    return process, path


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_with_a_checkpoint_that_goes_on(
    rank: int, alone: Path, tmp_path: Path
) -> None:
    process, path = begun(tmp_path, "checkpoint_every=2")
    start = time.monotonic()
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    _, told = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    newest = RunFolder(path).checkpoints()[-1]
    words = f"error: rank {rank} of 2 was ended by SIGKILL; the others have been ended. "
    assert f"{words}{newest.name} holds" in told
    assert f"Go on with resume={path}" in told
    rounds = f"rounds={len(lines(path / 'metrics.jsonl')) + 2}"
    whole = finished(*LONG, "ranks=2", f"resume={path}", rounds, folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    for number in range(1, 3):
        assert table(path, "steps", number) == table(alone, "steps", number)


@pytest.mark.slow
def test_a_hangup_that_is_ignored_ends_no_rank(tmp_path: Path) -> None:
    path = tmp_path / "run"
    words = ["nohup", *command(*LONG, "ranks=2", f"run_dir={path}", "rounds=10")]
    process = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, start_new_session=True)
    wait_until(lambda: len(lines(path / "metrics.jsonl")) >= 2)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(PATIENCE) == 0
    assert len(lines(path / "metrics.jsonl")) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("ranks=1", "ranks=2"), ("ranks=2", "ranks=1"), ("ranks=3", "ranks=2")]
)
def test_a_run_goes_on_at_another_number_of_ranks(
    before: str, after: str, alone: Path, tmp_path: Path
) -> None:
    path = played(tmp_path, before, rounds=1)
    done = finished(*RUN, after, f"resume={path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"changed ranks: {before[-1]} -> {after[-1]}" in (path / "log.txt").read_text()
    agree(alone, path, range(1, 3))


def listening(pid: int) -> list[str]:
    """Addresses that a process listens at, in the system's hexadecimal."""
    mine = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


@pytest.mark.slow
def test_ranks_listen_on_loopback_alone_and_end_with_a_checkpoint_when_their_launcher_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    process, path = begun(tmp_path, "checkpoint_every=0")
    ranks = ranks_of(process)
    assert listening(process.pid) == []
    for pid in ranks.values():
        assert set(listening(pid)) == {"0100007F"}  # 127.0.0.1
    process.kill()
    with pytest.raises(UserError, match="another process"), lock_folder(RunFolder(path)):
        pass
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()))
    assert RunFolder(path).checkpoints()
    assert not list(tmp_path.glob("esper_ranks_*"))
