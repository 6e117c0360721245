"""Files of a run that somebody deletes while it goes on: the run says so and fails."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from esper_soa.system.files import IncompleteError
from esper_soa.training.files.claims import Claim
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.trainer import finish_run, start_run, train_rounds
from tests.builders.tiny_runs import records, settings


def played(folder: Path, after_round: Callable[[], object]) -> None:
    """A run of three rounds, the second of which is the best; after it `after_round` is called."""
    (folder / "config.yaml").touch()
    with session(RunFolder(folder)) as within:
        run = start_run(within, settings(), None)
        with closing(run):
            for done in train_rounds(run):
                if done == 2:
                    after_round()
            finish_run(run)


@pytest.mark.parametrize(
    "names",
    [
        ("metrics.jsonl", "episodes.jsonl"),
        ("log.txt",),
        ("versions.json", "telemetry", "networks"),
        ("config.yaml", "best.pt"),
    ],
)
def test_files_that_were_deleted_are_named_and_the_run_fails_at_its_end(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    def delete() -> None:
        for path in (tmp_path / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    told = rf"^{tmp_path}: .+ could not be written \(somebody has deleted it\)$"
    with pytest.raises(IncompleteError, match=told) as e:
        played(tmp_path, delete)
    assert [name for name in names if name not in str(e.value)] == []
    if "log.txt" not in names:
        assert "has deleted it); the run goes on" in (tmp_path / "log.txt").read_text()
    if "metrics.jsonl" not in names:
        assert len(records(tmp_path / "metrics.jsonl")) == 3


def test_a_run_stops_where_its_lock_was_deleted(tmp_path: Path) -> None:
    with pytest.raises(
        IncompleteError,
        match=r"^/.*: \.lock was deleted, so another run may enter; this run stops$",
    ):
        played(tmp_path, (tmp_path / ".lock").unlink)
    assert len(records(tmp_path / "metrics.jsonl")) == 2


def test_processes_of_one_run_share_its_lock_and_it_outlives_the_first(tmp_path: Path) -> None:
    launcher = Claim(tmp_path)
    rank = Claim(tmp_path, shared=True)
    launcher.release()
    with pytest.raises(BlockingIOError):
        Claim(tmp_path)
    rank.release()
    Claim(tmp_path).release()
