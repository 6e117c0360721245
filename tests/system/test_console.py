"""A console that goes away: the program goes on, the log has all, the status is the work's."""

import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from esper_soa.system.console import (
    SafeStream,
    ending_with_status,
    null_stream,
    parser,
    safe_stream,
)
from esper_soa.system.errors import UserError
from esper_soa.system.files import IncompleteError
from esper_soa.training.files.session import quiet_warnings
from tests.builders import warm
from tests.builders.program import ENVIRONMENT, PATIENCE, TINY, command

TOLD = (
    "accuracy, mean over hosts (%)",
    "hosts    2 x cifar_impaired",
    "round 2/2  8/12 env-steps",
    "env-steps/s at T=16",
)
ASKED = [*TINY, "run_dir=run", "telemetry.plain_interval=0.001"]
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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_console_on_a_full_disk_is_no_failure(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SAY, str(tmp_path)]
    with open("/dev/full", "w") as full:
        streams = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": full}
        done = warm.run(asked, env=ENVIRONMENT, timeout=PATIENCE, **streams)
    assert done.returncode == 0
    assert [line for line in logged(tmp_path) if "console" in line] == [
        "WARNING console  is gone (No space left on device): the log alone has what is said"
    ]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_no_file_takes_the_place_of_a_stream_that_was_closed(tmp_path: Path, closed: str) -> None:
    script = f'"$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", SAY, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=PATIENCE,
    )
    assert done.returncode == 0
    assert done.stderr == ("" if "2>" in closed else "no more\n")
    assert done.stdout.count("shown") == (0 if closed.startswith(">") else 3)
    said = [line for line in logged(tmp_path) if "console" not in line]
    assert said == [
        f"{kind} {number}" for number in range(3) for kind in ("DEBUG shown", "INFO logged")
    ]
    assert (
        "(it was closed before the start)" in (tmp_path / "log.txt").read_text()
    ) == closed.startswith(">")


def test_a_mistake_that_nobody_can_be_told_has_its_status(tmp_path: Path) -> None:
    process = warm.Popen(command("envs=0"), cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 2


def test_what_is_left_to_say_at_the_end_may_fail(tmp_path: Path) -> None:
    process = warm.Popen(
        command("--cfg", "job"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("streams", ["out", "both"])
def test_a_run_whose_reader_is_gone_is_played_and_saved_to_its_end(
    tmp_path: Path, streams: str
) -> None:
    errors = subprocess.STDOUT if streams == "both" else subprocess.PIPE
    process = warm.Popen(
        command(*ASKED), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read() if process.stderr is not None else b""
    assert process.wait(timeout=PATIENCE) == 0
    assert told == b""
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("console  is gone (Broken pipe)") == 1
    for words in TOLD:
        assert words in log
    assert (tmp_path / "run" / "checkpoint_000002.pt").exists()
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("message", "category", "module", "heard"),
    [
        ("Using lock_() inside a compiled graph: ...", UserWarning, "tensordict.utils", False),
        ("Using lock_() inside a compiled graph: ...", UserWarning, "elsewhere", True),
        ("Using lock_() inside a compiled graph: ...", FutureWarning, "tensordict.utils", True),
        ("Something else is wrong.", UserWarning, "tensordict.utils", True),
    ],
)
def test_of_the_warnings_of_libraries_only_those_are_unheard_that_are_named(
    message: str, category: type[Warning], module: str, heard: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_warnings():
            warnings.warn_explicit(message, category, "utils.py", 1, module)
    assert len(caught) == heard


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


def test_output_that_nobody_wants_is_no_failure_and_output_that_is_lost_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for reason in ("", "it was closed before the start", "Broken pipe"):
        monkeypatch.setattr(sys, "stdout", null_stream(reason))
        with ending_with_status():
            print("something")
    monkeypatch.setattr(sys, "stdout", null_stream(FULL))
    with pytest.raises(SystemExit) as end, ending_with_status():
        print("something")
    told = f"error: standard output could not be written ({FULL})\n"
    assert (end.value.code, capsys.readouterr().err) == (1, told)


def test_the_help_of_a_command_is_shown_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    files = "FILE  the file,\n      or a folder"
    words = parser("esper-look FILE", "Look at a file.", files)
    options = "options:\n  -h, --help  show this help message and exit\n"
    usage = "usage: esper-look FILE\n"
    assert words.format_help() == f"{usage}\nLook at a file.\n\n{options}\n{files}\n"
    with pytest.raises(SystemExit):
        words.parse_args(["file"])
    told = f"{usage}esper-look: error: unrecognized arguments: file\n"
    assert capsys.readouterr().err == told
