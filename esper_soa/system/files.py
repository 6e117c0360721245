"""Writing to a disk that may be full: texts replaced whole, lines appended whole, and what could
not be written. A run continues if a file cannot be written, and ends with a failure. Paths of users
are resolved before they come here (plain_files.py). Needs no torch.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from esper_soa.system.plain_files import open_plain, replacing

LOGGER = logging.getLogger("esper_soa")
DELETED_REASON = "somebody has deleted it"


class IncompleteError(Exception):
    """The run is complete, but some files could not be written."""


def reason_of(error: OSError) -> str:
    """The system's error text."""
    return error.strerror or str(error)


def sync(path: Path) -> None:
    """Make the file `path`, or the names in the folder `path`, survive a power cut; or OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WriteErrors:
    """Files that could not be written, with the reason, until a later attempt succeeds."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._folders: dict[str, WriteErrors] = {}

    def within(self, folder: str) -> "WriteErrors":
        """Errors of a folder below, which count here too."""
        self._folders[folder] = WriteErrors()
        return self._folders[folder]

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Write the file `name` in the context: a failure is noted, a success takes it back."""
        try:
            yield
        except OSError as error:
            self.note(name, reason_of(error))
        else:
            self.reasons.pop(name, None)

    def note(self, name: str, reason: str) -> None:
        """Say once that the file `name` could not be written, and keep the reason."""
        if name not in self.reasons:
            LOGGER.warning("%s could not be written (%s); the run goes on", name, reason)
        self.reasons[name] = reason

    def __str__(self) -> str:
        """All of them in one line; empty where all could be written."""
        by_reason: dict[str, list[str]] = {}
        parts = {"": self} | {f"{folder}/": part for folder, part in self._folders.items()}
        for folder, part in parts.items():
            for name, reason in part.reasons.items():
                by_reason.setdefault(reason, []).append(folder + name)
        texts = [(", ".join(names), reason) for reason, names in by_reason.items()]
        return "; ".join(f"{names} could not be written ({reason})" for names, reason in texts)


def write_text(path: Path, text: str) -> None:
    """Replace the file `path` by `text`, all or nothing; raises OSError."""
    with replacing(path) as draft:
        draft.write(text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, all or nothing, to survive a power cut; raises OSError."""
    with replacing(path) as draft:
        draft.write(content)
        draft.flush()
        os.fsync(draft.fileno())
    sync(path.parent)


class LineFile:
    """Appends lines to a file at once, each whole or not at all.

    Lines that could not be written are kept, and written before the next. The first makes the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None
        self._waiting: list[str] = []

    def write(self, *lines: str) -> None:
        """Append `lines`, without their ends; raises OSError where any line must wait, and where
        the file was deleted meanwhile.
        """
        self._waiting.extend(lines)
        if self._handle is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._handle = open_plain(self._path, flags)
        status = os.fstat(self._handle)
        if not status.st_nlink:
            raise FileNotFoundError(errno.ENOENT, DELETED_REASON)
        end = status.st_size
        text = "".join(f"{line}\n" for line in self._waiting)
        remaining = memoryview(text.encode(errors="backslashreplace"))
        try:
            while remaining:
                remaining = remaining[os.write(self._handle, remaining) :]
        except OSError:
            os.ftruncate(self._handle, end)
            raise
        self._waiting.clear()

    def sync(self) -> None:
        """Make all lines survive a power cut; raises OSError."""
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
