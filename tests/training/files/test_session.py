"""What surrounds a run: what its log says at the end, what could not be written, who reads it."""

import re
import signal
import subprocess
import sys
from contextlib import suppress
from logging import NOTSET
from pathlib import Path

import pytest

from esper_soa.system.errors import PrunedError, RankLostError, UserError
from esper_soa.system.files import LOGGER, IncompleteError
from esper_soa.system.signals import Interrupted
from esper_soa.training.files.run_folder import RunFolder, open_run_folder
from esper_soa.training.files.session import session


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def logged(folder: RunFolder) -> list[str]:
    """The lines of the log, without times."""
    return [re.sub(r"^\S+ \S+ ", "", line) for line in folder.log.read_text().splitlines()]


def test_the_log_has_the_error_that_ended_a_run(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="of the program"), session(folder):
        raise ValueError("of the program")
    log = folder.log.read_text()
    assert " DEBUG ended by an error\nTraceback (most recent call last):\n" in log
    assert log.endswith("\nValueError: of the program\n")


@pytest.mark.parametrize(
    "error",
    [
        *(IncompleteError("a is missing"), Interrupted(signal.SIGTERM), PrunedError(2, 12.5)),
        RankLostError("rank 1 has ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_end_that_is_no_fault_of_the_program_is_a_line_of_the_log(
    folder: RunFolder, error: Exception
) -> None:
    for _ in range(2):
        with pytest.raises(type(error)), session(folder):
            raise error
    assert logged(folder) == [f"DEBUG ended: {error}"] * 2


def test_a_refusal_leaves_a_folder_in_which_a_run_has_begun_as_it_is(folder: RunFolder) -> None:
    folder.log.write_text("begun\n")
    with pytest.raises(UserError), session(folder):
        raise UserError("a=1: must be 2")
    assert folder.log.read_text() == "begun\n"


def test_a_mistake_that_ends_a_run_later_leaves_what_was_played(folder: RunFolder) -> None:
    def refuse_after(name: str) -> None:
        (folder.path / name).write_text("1\n")
        raise UserError("an action that is not legal")

    for name in ("config.yaml", "metrics.jsonl"):
        with pytest.raises(UserError), session(folder, verbose=0):
            refuse_after(name)
        assert (folder.path / name).exists() == (name == "metrics.jsonl")
    assert folder.log.exists()


def test_a_refusal_leaves_the_folder_that_was_there_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "made"):
        folder = open_run_folder(str(tmp_path / name), "smoke")
        with pytest.raises(UserError), session(folder, verbose=0):
            raise UserError("a=1: must be 2")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_messages_do_nothing_to_the_terminal(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(folder):
        LOGGER.warning("a name \x1b[2J")
    assert "a name \\x1b[2J" in capsys.readouterr().out


def test_the_callers_logger_is_as_it_was(folder: RunFolder) -> None:
    before = LOGGER.level, LOGGER.propagate
    with suppress(ValueError), session(folder):
        raise ValueError
    assert (LOGGER.level, LOGGER.propagate) == before == (NOTSET, True)


def test_a_library_that_crashes_is_named_by_what_called_it(folder: RunFolder) -> None:
    code = "import ctypes; from pathlib import Path; from esper_soa.training.files import session\n"
    code += "def native_step(): ctypes.string_at(0)\n"
    code += f"with session.session(session.RunFolder(Path({str(folder.path)!r}))): native_step()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr
    assert "in native_step" in done.stderr


def test_a_part_of_the_work_has_a_folder_below_and_its_failures_count(folder: RunFolder) -> None:
    (folder.path / "task").mkdir()  # of a run that goes on
    with session(folder, verbose=0) as opened:
        part = opened.within("task")
        assert (part.part, part.folder) == ("task", RunFolder(folder.path / "task"))
        assert (part.log, part.claim) == (opened.log, opened.claim)
        assert opened.within("new").folder.path.is_dir()
        part.write_errors.note("a", "full")
        with pytest.raises(IncompleteError) as caught:
            opened.finish()
    assert str(caught.value) == f"{folder.path}: task/a could not be written (full)"
    assert opened.claim is not None
