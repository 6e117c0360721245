"""A console that goes away: the program goes on, the log has all, the status is the work's."""

import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper_soa.lab.conformance import ConformanceError
from esper_soa.system.console import (
    SafeStream,
    ending_with_status,
    null_stream,
    safe_stream,
)
from esper_soa.system.errors import PrunedError, SettingError, UserError
from esper_soa.system.files import IncompleteError
from esper_soa.system.plain_files import NotPlainError
from esper_soa.system.signals import Interrupted
from tests.builders.program import ENVIRONMENT, PATIENCE

SAY = """
import sys
from pathlib import Path
from esper_soa.system.console import safe_streams
from esper_soa.training.results.progress import LOGGER, show
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
with safe_streams():
    with session(RunFolder(Path(sys.argv[1]))) as within:
        for number in range(3):
            show(within.console, f"shown {number}")
            LOGGER.info("logged %d", number)
            within.check_console()
            sys.stdin.readline()
        print("no more", file=sys.stderr)
        within.finish()
"""


def logged(folder: Path) -> list[str]:
    """The messages of the log, without times."""
    return [
        re.sub(r"^\S+ \S+ ", "", line) for line in (folder / "log.txt").read_text().splitlines()
    ]


def test_what_is_said_after_the_reader_is_gone_stands_in_the_log(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAY, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["shown 0\n", "logged 0\n"]
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=PATIENCE) == 0
    gone = "WARNING console  is gone (Broken pipe): the log alone has what is said"
    assert logged(tmp_path) == [
        "DEBUG shown 0",
        "INFO logged 0",
        "DEBUG shown 1",
        "INFO logged 1",
        gone,
        "DEBUG shown 2",
        "INFO logged 2",
    ]


class Broken(io.StringIO):
    """A terminal that is closed, and then gives another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons = iter(("gone", "still gone"))

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, next(self.reasons))

    def flush(self) -> None:
        raise OSError(next(self.reasons))


def test_a_stream_that_is_lost_is_no_terminal_and_keeps_its_first_reason() -> None:
    stream = SafeStream(Broken())
    assert (stream.isatty(), stream.lost, stream.encoding) == (True, "", "utf-8")
    own = SafeStream(sys.__stdout__)
    assert (own.writable(), own.fileno()) == (True, sys.__stdout__.fileno())
    assert stream.write("text") == 4
    stream.flush()
    assert (stream.isatty(), stream.lost) == (False, "gone")
    flushed = SafeStream(Broken())
    flushed.flush()
    assert flushed.lost == "gone"
    assert safe_stream(flushed) is flushed
    assert safe_stream(None).lost == "it was closed before the start"
    assert null_stream().lost == ""


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UserError("a=1: must be 2"), 2, "a=1: must be 2"),
        (IncompleteError("a is not written"), 1, "a is not written"),
        (OSError(28, FULL, "a"), 1, f"a: cannot be written ({FULL})"),
    ],
)
def test_a_command_that_fails_ends_with_one_line_and_a_status(
    error: Exception, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, ending_with_status():
        raise error
    assert (end.value.code, capsys.readouterr()) == (status, ("", f"error: {told}\n"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_signs_that_an_output_lacks_are_replaced(encoding: str) -> None:
    written = io.BytesIO()
    stream = safe_stream(io.TextIOWrapper(written, encoding))
    stream.write("─ 5 ± 2 \ud800\n")
    stream.flush()
    shown = {"ascii": "? 5 ? 2 ?\n", "latin-1": "? 5 ± 2 ?\n", "utf-8": "─ 5 ± 2 ?\n"}
    assert written.getvalue().decode(encoding) == shown[encoding]
    assert not stream.lost


@pytest.mark.parametrize(
    "error",
    [
        SettingError("seed", "", "a number", remedy="Give one."),
        PrunedError(rounds=3, accuracy=50.0),
        Interrupted(15, "a file"),
        NotPlainError(40, "a link", "x"),
        UserError("x"),
        ConformanceError("seed", "x:y", ["a", "b"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickle_as_pools_of_processes_send_them(error: BaseException) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
