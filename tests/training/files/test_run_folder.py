"""The run folder: where it goes, when it is refused, what is recorded in it."""

import re
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from esper_soa.system.errors import UserError
from esper_soa.training.files.checksum import write_sealed
from esper_soa.training.files.claims import Claim, lock_folder
from esper_soa.training.files.run_folder import (
    NAMES_FILE,
    RunFolder,
    dated_folders,
    find_checkpoint,
    open_run_folder,
    rounds_of,
    write_config,
)
from esper_soa.training.start.begin import requested_folder, resume_start


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


def test_what_a_killed_process_left_half_written_goes_and_nothing_else(tmp_path: Path) -> None:
    draft = f".esper_soa-{'0f' * 8}.tmp"
    left = (draft, f"networks/{draft}", f".hydra/{draft}", f"telemetry/steps/{draft}")
    mine = ("a.tmp", "summary.json.123.tmp", "networks/data.csv.7.tmp", "checkpoint_000001.pt")
    mine += (f"other/{draft}", f"{draft}.tmp", f"networks/other/{draft}")
    for folder in ("networks/other", ".hydra", "telemetry/steps", "other"):
        (tmp_path / folder).mkdir(parents=True)
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


def test_what_has_no_checkpoint_is_told_with_what_may_be_meant(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    with pytest.raises(UserError, match=r"or a run folder, such as /.*/runs/b$"):
        find_checkpoint(str(tmp_path / "runs"), "resume")
    with pytest.raises(UserError, match="resume=auto goes on with the newest run$"):
        find_checkpoint("true", "resume")


@pytest.fixture
def three(tmp_path: Path) -> RunFolder:
    """A run folder with whole checkpoints after 1, 2 and 3 rounds, and the best one."""
    folder = RunFolder(tmp_path)
    for path in (*map(folder.checkpoint, (1, 2, 3)), folder.best):
        write_sealed(path, bytes(100))
    return folder


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


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "mlflow.db", "trace.json.tmp"])
def test_what_is_written_in_place_has_no_second_name(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for inner, outer in ((run / "checkpoint_000001.pt", "kept"), (run / name, "outside")):
        RunFolder(run).check_plain()  # a checkpoint is replaced
        (tmp_path / outer).touch()
        inner.hardlink_to(tmp_path / outer)
    told = rf"^{run}/{name}: a hard link"
    with pytest.raises(UserError, match=told), lock_folder(RunFolder(run)):
        pass


def test_a_journal_by_which_sqlite_would_delete_a_file_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("of somebody else")
    (run := tmp_path / "run").mkdir()
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as database:
        database.executescript("create table a (b); begin; insert into a values (randomblob(9e6))")
        for name in ("mlflow.db", "mlflow.db-journal"):
            shutil.copy(tmp_path / name, run)  # as a kill leaves them
    RunFolder(run).check_plain()
    name = str(outside).encode()
    with (run / "mlflow.db-journal").open("ab") as journal:
        journal.write(bytes(4) + name + struct.pack(">II", len(name), sum(name)) + NAMES_FILE)
    with pytest.raises(UserError, match=rf"^{run}/mlflow\.db-journal: a journal"):
        RunFolder(run).check_plain()
    with closing(sqlite3.connect(run / "mlflow.db")) as database:
        database.execute("select * from a")
    assert not outside.exists()  # which is what was refused
