"""Plain files in folders that may come from strangers: no link is followed, no pipe is opened.

A path is walked folder by folder from its beginning, and what is no folder on the way, or no plain
file at its end, is refused by name; so is a file with a second name (a hard link) where it would be
written, as its content may be somebody else's. Whoever takes a path from a user resolves it first,
so that the links in it are followed, and none below. Needs no torch.
"""

import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from esper_soa.system.errors import UserError, one_line

# A folder is searched on the way, and need not be readable.
SEARCH = os.O_DIRECTORY | (os.O_PATH if sys.platform == "linux" else os.O_RDONLY)
FILE = "file"
FOLDER = "folder"
OTHER = "other"  # a link, whatever it leads to, a pipe, a socket, a device
DRAFT = re.compile(r"\.esper_soa-[0-9a-f]{16}\.tmp")


class NotPlainError(UserError, OSError):
    """A link, pipe or device, which is named, stands where a plain file or a folder is wanted."""

    def __str__(self) -> str:
        return f"{one_line(self.filename)}: {self.strerror}"


def refusal(path: Path, status: os.stat_result) -> OSError:
    """The error for what has this status where a plain file is wanted."""
    if stat.S_ISDIR(status.st_mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a link" if stat.S_ISLNK(status.st_mode) else "a pipe, socket or device"
    remedy = "Delete it, or give the path that is meant"
    if stat.S_ISREG(status.st_mode):
        kind = "a hard link, whose content has a second name elsewhere"
        remedy = "Move a copy of it to its place"
    reason = f"{kind}, where a plain file or a folder is wanted. {remedy}"
    return NotPlainError(errno.ELOOP, reason, str(path))


def _open(path: Path, flags: int, folder: int) -> int:
    """A handle of `path`, which is in the folder of the handle `folder`."""
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        with suppress(FileNotFoundError):
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise refusal(path, status) from error
        raise


@contextmanager
def folder_handle(path: Path) -> Iterator[int]:
    """A handle of the folder `path`, as functions of `os` take it; raises OSError."""
    handle = os.open(path.anchor or ".", SEARCH)
    try:
        place = Path(path.anchor)
        for name in path.relative_to(path.anchor).parts:
            place /= name
            inner = _open(place, SEARCH, handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """A handle of the plain file `path`, which has no second name where the flags are of writing;
    raises OSError.
    """
    with folder_handle(path.parent) as folder:
        handle = _open(path, flags | os.O_NONBLOCK, folder)
    status = os.fstat(handle)
    is_hard_link = status.st_nlink > 1
    if (is_hard_link and flags & (os.O_WRONLY | os.O_RDWR)) or not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise refusal(path, status)
    return handle


def read_bytes(path: Path) -> bytes:
    """The content of the plain file `path`; raises OSError."""
    with os.fdopen(open_plain(path), "rb") as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of the plain file `path`; raises OSError, and UnicodeDecodeError for no UTF-8."""
    return read_bytes(path).decode("utf-8", errors)


def list_folder(path: Path) -> dict[Path, str]:
    """Kinds (FILE, FOLDER, OTHER) of what is in the folder `path`, by name; empty without one."""
    try:
        with folder_handle(path) as folder:
            handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except NotPlainError as error:
        if error.filename != os.devnull:  # the folder of ranks that write nothing
            raise
        return {}
    try:
        with os.scandir(handle) as entries:
            kinds = {entry.name: _kind(entry) for entry in entries}
    finally:
        os.close(handle)
    return {path / name: kinds[name] for name in sorted(kinds)}


def _kind(entry: os.DirEntry) -> str:
    if entry.is_file(follow_symlinks=False):
        return FILE
    return FOLDER if entry.is_dir(follow_symlinks=False) else OTHER


def find_not_plain(folders: Sequence[Path]) -> Iterator[Path]:
    """Links, pipes, sockets and devices in `folders` and below."""
    waiting = list(folders)
    while waiting:
        for path, kind in list_folder(waiting.pop()).items():
            if kind == FOLDER:
                waiting.append(path)
            elif kind == OTHER:
                yield path


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it, where it is new; raises OSError."""
    try:
        with folder_handle(path):
            return
    except FileNotFoundError:
        make_folder(path.parent)
    with folder_handle(path.parent) as folder, suppress(FileExistsError):
        os.mkdir(path.name, dir_fd=folder)


def remove(path: Path) -> None:
    """Delete the file `path` where it is there, or the link itself; raises OSError."""
    with suppress(FileNotFoundError), folder_handle(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write in the context, which then becomes `path`; where that fails, the old file
    stays whole, nothing lies beside it, and the error names `path`.
    """
    try:
        with folder_handle(path.parent) as folder:
            with suppress(FileNotFoundError):
                status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    raise refusal(path, status)
            name, handle = _begin_draft(folder)
            try:
                with os.fdopen(handle, "wb") as draft:
                    yield draft
                    draft.flush()
                    os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
    except OSError as error:
        error.filename = str(path) if not isinstance(error, NotPlainError) else error.filename
        raise


def _begin_draft(folder: int) -> tuple[str, int]:
    """The name and a handle of a new file in the folder, locked while its process is there."""
    while True:
        name = f".esper_soa-{os.urandom(8).hex()}.tmp"
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return name, handle
        os.close(handle)  # another process took it for one that was left


def drop_drafts(folder: Path) -> None:
    """Delete the drafts in `folder` whose process is gone."""
    for path, kind in list_folder(folder).items():
        if kind == FILE and DRAFT.fullmatch(path.name):
            with suppress(OSError), os.fdopen(open_plain(path, os.O_RDWR), "rb") as draft:
                fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
