"""The cache folder of compiled kernels, and which files in it are run: those that this user wrote, whole and unchanged.

A library stands under a name made of its key and its content; beside it `nets-<key>.sha256` holds its digest in the
format of sha256sum. That file is written last, so a library that was cut off in the making is never run. Whoever can
write in the folder could run code as this user: it must be the user's own, closed to all others, and no link. Called by
library.py.
"""

import hashlib
import os
import pwd
import shutil
import stat
import time
from pathlib import Path

from esper_soa.paths import sync

DRAFT = "draft-"  # begins the name of a folder in which a compiler works
DRAFT_SECONDS = 3600.0  # older drafts belong to a process that was killed


class NativeError(Exception):
    """Why there are no native kernels here, in words for the user."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/esper_soa, or .cache/esper_soa in the home folder of $HOME or else of the user database.

    Paths that are not absolute count as not given. Raises NativeError where nothing says where home is.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):
        return Path(root) / "esper_soa"
    return _home() / ".cache" / "esper_soa"


def _home() -> Path:
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            home = ""
    if not os.path.isabs(home):
        raise NativeError("there is no home folder to keep them in (set HOME or XDG_CACHE_HOME)")
    return Path(home)


def open_folder(path: Path) -> None:
    """Make the folder where it is missing, and close it to others where they could only read in it.

    Raises NativeError for a link, for the folder of another user and for one that others can write in: what lies in
    there may be anybody's. Folders above it are the user's business.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeError(f"the cache folder {path} cannot be written: {error}") from error
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NativeError(f"the cache folder {path} is a link or no folder: delete it ({error.strerror})") from error
    try:
        found = os.fstat(handle)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            raise NativeError(f"the cache folder {path} belongs to user {found.st_uid}: set XDG_CACHE_HOME to another")
        if mode & 0o022:
            raise NativeError(f"others can write in the cache folder {path} (mode {mode:o}): delete it")
        if mode & 0o077:
            os.fchmod(handle, mode & 0o700)
    finally:
        os.close(handle)


def _own_bytes(path: Path) -> bytes | None:
    """Content of a file of this user that others cannot write; None where there is none, or something else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        return file.read() if own else None


def _library(folder: Path, key: str, digest: str) -> Path:
    return folder / f"nets-{key}-{digest[:16]}.so"


def _line(library: Path, digest: str) -> bytes:
    return f"{digest}  {library.name}\n".encode()


def stored(folder: Path, key: str) -> Path | None:
    """The library of `key`, if it is what `store` stored."""
    said = _own_bytes(folder / f"nets-{key}.sha256")
    if said is None:
        return None
    digest = said[:64].decode(errors="replace")
    library = _library(folder, key, digest)
    if said != _line(library, digest):
        return None
    content = _own_bytes(library)
    return library if content is not None and hashlib.sha256(content).hexdigest() == digest else None


def kept(key: str) -> Path | None:
    """The library of `key` in the cache folder; None where none is there that can be trusted."""
    try:
        folder = cache_folder()
        if not folder.is_dir():
            return None
        open_folder(folder)
    except (NativeError, OSError):
        return None
    return stored(folder, key)


def store(folder: Path, key: str, draft: Path) -> Path:
    """Move the library `draft`, which lies in a folder within `folder`, to its place, on the disk for good.

    Raises OSError. Processes that do this at the same time leave one of their libraries each, and the digest of one.
    """
    _settle(draft)
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    library, said = _library(folder, key, digest), draft.with_name("digest")
    os.replace(draft, library)
    said.write_bytes(_line(library, digest))
    _settle(said)
    sync(folder)
    os.replace(said, folder / f"nets-{key}.sha256")
    sync(folder)
    return library


def _settle(file: Path) -> None:
    """For this user alone, and on the disk."""
    os.chmod(file, 0o700 if file.suffix == ".so" else 0o600)
    sync(file)


def drop_old_drafts(folder: Path) -> None:
    """Delete what killed processes left of their work."""
    for draft in folder.glob(f"{DRAFT}*"):
        if time.time() - draft.lstat().st_mtime > DRAFT_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)
