"""The user's cache folder, in which compiled code and what is slow to read are kept.

It is that user's own, and closed to others, as whoever can write in it could run code as this user.
Needs no torch.
"""

import os
import pwd
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

DRAFT_PREFIX = "draft-"  # begins the name of a folder in which a compiler works
DRAFT_SECONDS = 3600.0  # older drafts belong to a process that was killed


class FolderError(Exception):
    """Why there is no folder to keep things in, in words for the user."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/esper_soa, or .cache/esper_soa in $HOME or the user database's home.

    Paths that are not absolute count as not given. FolderError where nothing says home.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):
        return Path(root) / "esper_soa"
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        with suppress(KeyError):
            home = pwd.getpwuid(os.geteuid()).pw_dir
    if not os.path.isabs(home):
        raise FolderError("there is no home folder to keep them in (set HOME or XDG_CACHE_HOME)")
    return Path(home) / ".cache" / "esper_soa"


def open_cache(name: str = "") -> Path:
    """The cache folder, or the one of this name in it, by `open_folder`; raises FolderError."""
    folder = cache_folder()
    open_folder(folder)
    if name:
        open_folder(folder / name)
    return folder / name


def open_folder(path: Path) -> None:
    """Make the folder where it is missing, and close it to others where they could only read in it.

    Raises FolderError for a link, for the folder of another user and for one that others can write
    in: what lies in there may be anybody's. Folders above it are the user's business.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise FolderError(f"the cache folder {path} cannot be written: {error}") from error
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        problem = f"is a link or no folder: delete it ({error.strerror})"
        raise FolderError(f"the cache folder {path} {problem}") from error
    try:
        status = os.fstat(handle)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            reason = f"belongs to user {status.st_uid}: set XDG_CACHE_HOME to another"
            raise FolderError(f"the cache folder {path} {reason}")
        if mode & 0o022:
            which = f"the cache folder {path} (mode {mode:o})"
            raise FolderError(f"others can write in {which}: delete it")
        if mode & 0o077:
            os.fchmod(handle, mode & 0o700)
    finally:
        os.close(handle)


def read_user_file(path: Path) -> bytes | None:
    """Content of a file of this user that others cannot write; None where there is no such file."""
    try:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            return file.read() if is_ours and not status.st_mode & 0o022 else None
    except OSError:  # there is none, or a link or a folder
        return None


def drop_old_drafts(folder: Path) -> None:
    """Delete drafts of killed processes."""
    for draft in folder.glob(f"{DRAFT_PREFIX}*"):
        if time.time() - draft.lstat().st_mtime > DRAFT_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)
