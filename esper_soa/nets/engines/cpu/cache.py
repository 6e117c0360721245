"""The cache folder of compiled kernels: it runs only unchanged files that this user wrote.

A library stands under a name made of its key and its content; beside it `nets-<key>.sha256` holds
its digest in the format of sha256sum. That file is written last, so a library that was cut off in
the making, or not tried to the end, is never run. Whoever can write in the folder could run code as
this user: it must be the user's own, closed to all others, and no link.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from esper_soa.system.caches import FolderError, cache_folder, open_folder, read_user_file
from esper_soa.system.files import sync


class NativeError(Exception):
    """There are no native kernels here; the message says why."""


def _library(folder: Path, key: str, digest: str) -> Path:
    return folder / f"nets-{key}-{digest[:16]}.so"


def _line(library: Path, digest: str) -> bytes:
    return f"{digest}  {library.name}\n".encode()


def load_stored(folder: Path, key: str) -> Path | None:
    """The library of `key`, if it is what `store` stored."""
    expected = read_user_file(folder / f"nets-{key}.sha256")
    if expected is None:
        return None
    digest = expected[:64].decode(errors="replace")
    library = _library(folder, key, digest)
    if expected != _line(library, digest):
        return None
    content = read_user_file(library) or b""
    return library if hashlib.sha256(content).hexdigest() == digest else None


def load_cached(key: str) -> Path | None:
    """The library of `key` in the cache folder; None where none is there that can be trusted."""
    try:
        folder = cache_folder()
        if not folder.is_dir():
            return None
        open_folder(folder)
    except (FolderError, OSError):
        return None
    return load_stored(folder, key)


def drop_stored(key: str) -> None:
    """Have the library of `key` count no more, where there is one that can be dropped."""
    with suppress(FolderError, OSError):
        (cache_folder() / f"nets-{key}.sha256").unlink()


def store(folder: Path, key: str, draft: Path) -> Path:
    """Move the library `draft`, from a folder within `folder`, to its place, on the disk for good.

    Raises OSError. Processes that do so at once leave a library each, and the digest of one.
    """
    _sync_private(draft)
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    library = _library(folder, key, digest)
    digest_file = draft.with_name("digest")
    os.replace(draft, library)
    digest_file.write_bytes(_line(library, digest))
    _sync_private(digest_file)
    sync(folder)
    os.replace(digest_file, folder / f"nets-{key}.sha256")
    sync(folder)
    return library


def _sync_private(file: Path) -> None:
    os.chmod(file, 0o700 if file.suffix == ".so" else 0o600)
    sync(file)
