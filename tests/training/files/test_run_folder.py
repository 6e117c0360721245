"""The run folder: where it goes, when it is refused, what is recorded in it."""

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
from omegaconf import OmegaConf

from esper_soa.config.settings import TrainConfig
from esper_soa.lab.sweep.plugins import open_sweep_folder
from esper_soa.system.errors import UserError
from esper_soa.system.versions import package_versions
from esper_soa.training.files import run_folder
from esper_soa.training.files.checksum import CheckpointError, write_sealed
from esper_soa.training.files.claims import Claim, lock_folder
from esper_soa.training.files.run_folder import (
    RunFolder,
    damaged_newer,
    dated_folders,
    find_checkpoint,
    open_run_folder,
    rounds_of,
    write_config,
    write_versions,
)
from esper_soa.training.files.session import session
from esper_soa.training.start.begin import begin_run, requested_folder, resume_start


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made for which no place is given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_run_without_a_folder_gets_one_of_its_own_named_after_run_and_time(runs: Path) -> None:
    folders = [open_run_folder("", "trial").path for _ in range(3)]
    assert len(set(folders)) == 3
    assert folders[0].parent == runs / "trial"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folders[0].name)


def test_a_given_folder_is_taken_as_it_is_and_left_empty(tmp_path: Path) -> None:
    folder = open_run_folder(str(tmp_path / "a" / "b"), "trial")
    assert folder.path == tmp_path / "a" / "b"
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize(
    "result",
    [
        *("metrics.jsonl", "episodes.jsonl", "summary.json", "evaluation.json", "best.pt"),
        *("checkpoint_000012.pt", "networks"),
    ],
)
def test_a_folder_with_results_is_refused(tmp_path: Path, result: str) -> None:
    (tmp_path / result).touch()
    told = rf"run_dir={tmp_path}: already holds the results of a run \({result}\)\. Choose another "
    with pytest.raises(UserError, match=rf"{told}folder, or go on with resume=auto\.$"):
        open_run_folder(str(tmp_path), "trial")


def test_a_folder_left_by_a_run_that_never_started_is_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(folder, "envs: 4\n", ["envs=4", "+experiment=smoke"])
    assert folder.config.read_text() == "envs: 4\n"
    assert folder.overrides.read_text() == "envs=4\n+experiment=smoke\n"
    assert open_run_folder(str(tmp_path), "trial") == folder


def test_folders_of_the_same_second_are_told_apart_by_a_number(tmp_path: Path) -> None:
    stamps = ("2026-01-02_00-00-00", "2026-01-02_00-00-00_2", "2026-01-02_00-00-00_10")
    names = ("2026-01-01_23-59-59", *stamps, "2026-01-03_00-00-00")
    for name in (*names, "2026-01-04", "2026-01-04_00-00-00_x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / f"sweep_{name}").mkdir()
    for prefix in ("", "sweep_"):
        found = [path.name for path in dated_folders(tmp_path, prefix)]
        assert found == [f"{prefix}{name}" for name in reversed(names)]


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        *(("checkpoint_000012.pt", 12), ("checkpoint_1000000.pt", 10**6)),
        *(("best_000003.safetensors", 3), ("hosts_000004.safetensors", 4)),
        *(("checkpoint_12.pt", -1), ("checkpoint_000012.pt.1.tmp", -1), ("best.pt", -1)),
        *(("best_000003.pt", -1), ("other_000003.safetensors", -1)),
    ],
)
def test_files_are_numbered_by_their_round(name: str, rounds: int) -> None:
    assert rounds_of(Path("run") / name) == rounds


def test_numbered_files_come_in_the_order_of_their_rounds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.networks.mkdir()
    for number in (1_000_000, 2, 999_999):
        folder.checkpoint(number).touch()
        for kind in ("best", "hosts"):
            folder.network(kind, number).touch()
    (tmp_path / "checkpoint_x.pt").touch()
    rounds = [2, 999_999, 1_000_000]
    assert folder.checkpoints() == [folder.checkpoint(number) for number in rounds]
    for kind in ("best", "hosts"):
        assert folder.network_files(kind) == [folder.network(kind, number) for number in rounds]


def test_what_a_killed_process_left_half_written_goes_and_nothing_else(tmp_path: Path) -> None:
    left = ("checkpoint_000001.pt.12.tmp", "networks/best_000001.safetensors.7.tmp")
    left += ("summary.json.123.tmp",)
    mine = ("a.tmp", "Notes.txt.1.tmp", "summary.json.tmp", "checkpoint_000001.pt")
    (tmp_path / "networks").mkdir()
    for name in (*left, *mine):
        (tmp_path / name).touch()
    with lock_folder(RunFolder(tmp_path)) as claim:
        there = [name for name in (*left, *mine) if (tmp_path / name).exists()]
        assert there == list(mine)
        (tmp_path / left[0]).touch()
    assert not (tmp_path / left[0]).exists()
    Claim(tmp_path).release()
    claim.release()  # once more, of what the context has let go


@pytest.mark.parametrize("result", ["summary.json", "evaluation.json"])
def test_auto_begins_anew_in_its_folder_unless_a_run_has_ended_there(
    tmp_path: Path, result: str
) -> None:
    (tmp_path / "metrics.jsonl").touch()  # of a run that ended before its first checkpoint
    assert resume_start("auto", str(tmp_path), "trial") == (RunFolder(tmp_path), None)
    (tmp_path / result).touch()
    with pytest.raises(UserError, match=f"already holds the results .*{result}"):
        resume_start("auto", str(tmp_path), "trial")


def test_a_path_through_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=(
            r"^run_dir=/.*/file/run: cannot be written \(Not a directory\)\. Choose "
            r"another with run_dir=\.\.\.$"
        ),
    ):
        open_run_folder(str(tmp_path / "file" / "run"), "trial")


@pytest.fixture
def three(tmp_path: Path) -> RunFolder:
    """A run folder with whole checkpoints after 1, 2 and 3 rounds, and the best one."""
    folder = RunFolder(tmp_path)
    for path in (*map(folder.checkpoint, (1, 2, 3)), folder.best):
        write_sealed(path, bytes(100))
    return folder


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 4
    path.write_bytes(content)


def test_a_checkpoint_goes_on_in_its_own_folder(
    three: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = str(three.checkpoint(2))
    monkeypatch.chdir(three.path.parent)
    for same in (str(three.path), three.path.name):
        assert resume_start(checkpoint, same, "trial").checkpoint == three.checkpoint(2)
    with pytest.raises(
        UserError,
        match=(
            r"^run_dir=/.*/other: a resumed run goes on in the folder of its checkpoint, "
            rf"{re.escape(str(three.path))}\. Leave run_dir out\.$"
        ),
    ):
        resume_start(checkpoint, str(tmp_path / "other"), "trial")


def test_a_folder_gives_its_newest_whole_checkpoint_and_says_what_was_passed_over(
    three: RunFolder,
) -> None:
    given = str(three.path)
    assert find_checkpoint(given, "resume") == three.checkpoint(3)
    assert damaged_newer(three.checkpoint(3)) == []
    damage(three.checkpoint(3))
    assert find_checkpoint(given, "checkpoint") == three.checkpoint(2)
    assert resume_start(given, "", "trial").checkpoint == three.checkpoint(2)
    assert resume_start("auto", given, "trial").checkpoint == three.checkpoint(2)
    three.checkpoint(2).write_bytes(b"")
    assert resume_start("auto", given, "trial").checkpoint == three.checkpoint(1)
    assert damaged_newer(three.checkpoint(1)) == [
        f"checkpoint {three.checkpoint(2)}: cut off, damaged, or not a checkpoint of this program; "
        "checkpoint_000001.pt is taken",
        f"checkpoint {three.checkpoint(3)}: damaged (its content is not what was written); "
        "checkpoint_000001.pt is taken",
    ]
    assert damaged_newer(three.best) == []  # of no round


def test_a_folder_is_named_once() -> None:
    config = OmegaConf.create({"run_dir": "", "hydra": {"run": {"dir": "b"}}})
    assert requested_folder(config, "hydra.run.dir") == "b"
    config.run_dir = "b"
    assert requested_folder(config, "hydra.run.dir") == "b"
    config.run_dir = "a"
    with pytest.raises(UserError) as caught:
        requested_folder(config, "hydra.run.dir")
    assert str(caught.value) == (
        "run_dir=a, hydra.run.dir=b: both name the folder. Give one of them"
    )


def test_ranks_that_were_started_again_begin_at_the_newest_checkpoint(
    three: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    given |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "launch"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    asked = str(three.checkpoint(2))
    with session(three, verbose=0) as opened:
        for resume, restarts, rounds in ((asked, 0, 2), (asked, 1, 3), ("", 0, 3)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
            found = begin_run(opened, TrainConfig(resume=resume), [])
            assert found == three.checkpoint(rounds)
    assert not three.config.exists()


def test_auto_passes_over_a_damaged_checkpoint_in_the_newest_folder_of_the_name(
    runs: Path,
) -> None:
    older, newer = (RunFolder(runs / "trial" / f"2026-01-01_00-00-0{number}") for number in (1, 2))
    for folder in (older, newer):
        folder.path.mkdir(parents=True)
        write_sealed(folder.checkpoint(1), bytes(100))
        write_sealed(folder.checkpoint(2), bytes(100))
    damage(newer.checkpoint(2))
    assert resume_start("auto", "", "trial") == (newer, newer.checkpoint(1))


def test_a_folder_without_a_whole_checkpoint_is_an_error(three: RunFolder) -> None:
    for rounds in (1, 2, 3):
        damage(three.checkpoint(rounds))
    for resume, run_dir in (("auto", str(three.path)), (str(three.path), "")):
        with pytest.raises(
            CheckpointError,
            match=rf"resume={resume}: .*000003\.pt: damaged .*\(and 2 older ones are no "
            r"better\)\. Give another run folder$",
        ):
            resume_start(resume, run_dir, "trial")


def test_a_damaged_checkpoint_that_was_named_is_refused_with_the_one_to_take(
    three: RunFolder,
) -> None:
    for path, instead in ((three.checkpoint(2), 1), (three.best, 3)):
        damage(path)
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(str(path), "resume")
        assert str(caught.value) == (
            f"resume={path}: checkpoint {path}: damaged (its content is not what was written). "
            f"The newest whole one before it is {three.checkpoint(instead)}"
        )
    damage(three.checkpoint(1))
    told = (
        r"^resume=/.*/checkpoint_000001\.pt: checkpoint /.*/checkpoint_000001\.pt: damaged \(its "
        r"content is not what was written\)$"
    )
    with pytest.raises(CheckpointError, match=told):
        find_checkpoint(str(three.checkpoint(1)), "resume")


HOPELESS = ("~nosuchuser/run", "x" * 5000, "run\udcff", "run\0")


@pytest.mark.parametrize("given", HOPELESS, ids=range(len(HOPELESS)))
def test_what_cannot_be_a_path_is_refused_by_setting_in_one_line(given: str) -> None:
    for setting, use in (
        ("run_dir", lambda: open_run_folder(given, "trial")),
        ("run_dir", lambda: resume_start("auto", given, "trial")),
        ("resume", lambda: resume_start(given, "", "trial")),
        ("checkpoint", lambda: find_checkpoint(given, "checkpoint")),
    ):
        with pytest.raises(UserError) as caught:
            use()
        told = str(caught.value)
        assert told.startswith(f"{setting}=")
        assert told.isprintable()
        assert len(told) < 1000


def test_a_sweep_gets_a_folder_of_its_own_unless_it_goes_on(runs: Path) -> None:
    first, second = (open_sweep_folder("", "trial", resume=False) for _ in range(2))
    assert first != second
    assert re.fullmatch(r"sweep_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first.name)
    (runs / "trial" / "2099-01-01_00-00-00").mkdir()  # a run, no sweep
    assert open_sweep_folder("", "trial", resume=True) == second
    assert open_sweep_folder("", "other", resume=True).parent == runs / "other"
    assert open_sweep_folder("given", "trial", resume=True) == runs.parent / "given"


def test_a_folder_in_which_nothing_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with (
        pytest.raises(
            UserError, match=rf"run_dir={tmp_path}: cannot be written \(Is a directory\)"
        ),
        lock_folder(RunFolder(tmp_path)),
    ):
        pass


def git(folder: Path, *words: str) -> str:
    """What git prints in `folder`."""
    asked = ["git", "-c", "user.name=x", "-c", "user.email=x", *words]
    return subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_versions_name_software_machine_device_commit_and_what_is_told_of_the_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    checkout = tmp_path / "checkout"
    tracked = checkout / "esper_soa" / "training" / "files" / "run_folder.py"
    tracked.parent.mkdir(parents=True)
    tracked.touch()
    monkeypatch.setattr(run_folder, "__file__", str(tracked))
    git(tmp_path, "init", "-q")  # of somebody else, around the checkout
    facts: dict = {"data": {"name": "fashion32"}, "state": "not compiled"}
    packages = package_versions()
    assert list(packages) == ["esper-soa", "torch", "tensordict", "numpy", "hydra-core", "rich"]
    assert packages["hydra-core"] == metadata.version("hydra-core")
    record = {
        "python": platform.python_version(),
        "packages": packages,
        "git": None,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": "cpu (test)",
    }
    write_versions(folder, "cpu (test)", facts)
    assert json.loads(folder.versions.read_text()) == record | facts
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        git(checkout, *words)
    commit = git(checkout, "rev-parse", "HEAD").strip()
    for text, found in (("", commit), ("more", f"{commit}+changes")):
        tracked.write_text(text)
        os.utime(tracked, (1e9, 1e9))  # not what git knows
        index = (checkout / ".git" / "index").read_bytes()
        write_versions(folder, "cpu (test)", facts)
        assert json.loads(folder.versions.read_text()) == record | facts | {"git": found}
        assert (checkout / ".git" / "index").read_bytes() == index


@pytest.mark.parametrize(
    "answer",
    [
        FileNotFoundError("git"),
        subprocess.TimeoutExpired("git", 10),
        subprocess.CompletedProcess([], 128, stdout=""),
    ],
    ids=["none", "slow", "refused"],
)
def test_versions_are_written_without_a_git_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(
        run_folder, "__file__", str(tmp_path / "esper_soa" / "training" / "files" / "x.py")
    )
    asked = mock.Mock(side_effect=cycle([answer]))
    monkeypatch.setattr(run_folder.subprocess, "run", asked)
    write_versions(folder, "cpu", {})
    assert asked.call_args.kwargs["timeout"] == 10
    assert json.loads(folder.versions.read_text())["git"] is None
