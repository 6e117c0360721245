"""Writing to a disk that is full: lines whole or waiting, texts replaced whole, and what is said of
it.

A limit on the size of files, set in a process of its own, fails writes as a full disk does.
"""

import errno
import os
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest

from esper_soa.system.files import LineFile, WriteErrors, write_bytes, write_text
from esper_soa.system.plain_files import drop_drafts, replacing
from tests.builders import warm

LIMITED = """
import resource, sys
from contextlib import closing
from pathlib import Path
from esper_soa.system.files import LineFile, WriteErrors, write_text

def allow(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

folder = Path(sys.argv[1])
"""


def limited(folder: Path, program: str) -> list[str]:
    """What `program` prints, where `allow(size)` limits the size of the files that it writes."""
    command = [sys.executable, "-c", LIMITED + program, str(folder)]
    done = warm.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_line_that_does_not_fit_leaves_no_part_of_itself_and_is_written_before_the_next(
    tmp_path: Path,
) -> None:
    told = limited(
        tmp_path,
        """
with closing(LineFile(folder / "lines")) as file:
    file.write("first line")
    allow(20)  # 11 characters are there: 9 more would fit
    for line in ("second line", "third line"):
        try:
            file.write(line)
        except OSError as error:
            print(error.strerror, repr((folder / "lines").read_text()))
    allow(resource.RLIM_INFINITY)
    file.write("fourth", "fifth")
""",
    )
    assert told == ["File too large 'first line\\n'"] * 2
    text = (tmp_path / "lines").read_text()
    assert text == "first line\nsecond line\nthird line\nfourth\nfifth\n"


def test_a_text_that_does_not_fit_leaves_the_old_one_and_no_other_file(tmp_path: Path) -> None:
    told = limited(
        tmp_path,
        """
write_text(folder / "text", "old")
allow(4)
try:
    write_text(folder / "text", "the new one")
except OSError as error:
    print(error.strerror)
""",
    )
    assert told == ["File too large"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"text": "old"}
    write_text(tmp_path / "text", "\udcff ü")  # what UTF-8 does not have is written out
    assert (tmp_path / "text").read_bytes() == b"\\udcff \xc3\xbc"


def test_lines_are_appended_to_those_that_are_there_and_no_line_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    for number in (1, 2):
        with closing(LineFile(tmp_path / "lines")) as file:
            file.write(f"line {number}", "\udcff")
            file.sync()
    assert (tmp_path / "lines").read_text() == "line 1\n\\udcff\nline 2\n\\udcff\n"
    assert synced == [14, 28]
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "lines").stat().st_mode) == 0o666 & ~mask
    with closing(LineFile(tmp_path / "none")) as file:
        file.sync()
    assert not (tmp_path / "none").exists()


def test_what_could_not_be_written_is_named_by_reason_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unwritten = WriteErrors()
    assert str(unwritten) == ""
    for name, reason in (("a", "full"), ("b", "too large"), ("c", "full"), ("c", "full")):
        with unwritten.attempt(name):
            raise OSError(28, reason)
    told = "a, c could not be written (full); b could not be written (too large)"
    assert str(unwritten) == told
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} could not be written ({reason}); the run goes on"  # each file once
        for name, reason in (("a", "full"), ("b", "too large"), ("c", "full"))
    ]
    with unwritten.attempt("a"):
        pass
    with unwritten.attempt("b"):
        raise OSError("no room")
    with unwritten.within("task").attempt("a"):
        raise OSError(28, "full")
    told = "b could not be written (no room); c, task/a could not be written (full)"
    assert str(unwritten) == told


def test_what_is_no_error_of_files_is_not_kept_back() -> None:
    with pytest.raises(ValueError, match="other"), WriteErrors().attempt("a"):
        raise ValueError("other")


def fill(path: Path) -> None:
    with replacing(path) as draft:
        draft.write(b"new")
        raise OSError(errno.ENOSPC, "full", "other")


def test_a_file_is_replaced_as_a_whole_or_stays_and_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as draft:
        draft.write(b"old")
        drop_drafts(tmp_path)  # none whose process is there
    with pytest.raises(OSError, match="full") as raised:
        fill(path)
    assert raised.value.filename == str(path)
    synced: list[str] = []
    open_files = Path("/proc/self/fd")
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(open_files / str(fd))))
    before = len(list(open_files.iterdir()))
    write_bytes(path, b"old")
    assert len(list(open_files.iterdir())) == before
    assert [Path(synced[0]).parent, *map(Path, synced[1:])] == [tmp_path, tmp_path]
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"a.txt": "old"}
