"""Files of a run that somebody deletes while it goes on: written anew, or said at its end."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tiny_runs import records, settings

from esper_soa.runtime.files import IncompleteError
from esper_soa.training.run_folder import Claim, RunFolder
from esper_soa.training.session import session
from esper_soa.training.trainer import finish_run, start_run, train_rounds


def played(folder: Path, after_round: Callable[[], object]) -> None:
    """A run of three rounds; `after_round` is called once, after the first."""
    with session(RunFolder(folder)) as within:
        run = start_run(within, settings(), None)
        with closing(run.output.callbacks):
            for done in train_rounds(run):
                if done == 1:
                    after_round()
            finish_run(run)


def test_lines_that_were_deleted_are_written_anew_and_the_run_is_whole(tmp_path: Path) -> None:
    def delete() -> None:
        for name in ("metrics.jsonl", "episodes.jsonl", "log.txt", ".lock"):
            (tmp_path / name).unlink()

    played(tmp_path, delete)
    assert [one["round"] for one in records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert len(records(tmp_path / "episodes.jsonl")) == 6
    assert "data     " in (tmp_path / "log.txt").read_text()
    assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize("name", ["versions.json", "telemetry", "networks"])
def test_what_cannot_be_written_anew_is_said_and_the_run_fails_at_its_end(
    tmp_path: Path, name: str
) -> None:
    def delete() -> None:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with pytest.raises(
        IncompleteError, match=f"{name}.* could not be written .somebody has deleted it"
    ):
        played(tmp_path, delete)
    assert "has deleted it); the run goes on" in (tmp_path / "log.txt").read_text()
    assert len(records(tmp_path / "metrics.jsonl")) == 3


def test_a_run_stops_where_another_has_come_in_as_the_lock_was_deleted(tmp_path: Path) -> None:
    other = Claim(tmp_path)

    def delete() -> None:
        (tmp_path / ".lock").unlink()
        other.take()

    with pytest.raises(IncompleteError, match="another process has taken the folder"):
        played(tmp_path, delete)
    other.release()
    assert len(records(tmp_path / "metrics.jsonl")) == 1


def test_processes_of_one_run_share_its_lock_and_it_outlives_the_first(tmp_path: Path) -> None:
    launcher, rank, other = (Claim(tmp_path) for _ in range(3))
    launcher.take()
    rank.take(shared=True)
    launcher.release()
    with pytest.raises(BlockingIOError):
        other.take()
    rank.release()
    other.take()
    other.release()
