"""Sealed files: a content, then one line with the version and a SHA-256 of everything before it.

A file appears under its name only when it is whole on the disk, and one changed, missing or added
bit anywhere is found. Needs no torch.
"""

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from esper_soa.errors import UserError, one_line
from esper_soa.ops.files import replacing
from esper_soa.paths import sync

# 3: the policy's weights are shared by all slots; in 2 their shapes went by the number of slots.
VERSION = 3
# A checkpoint of version 1 has this text within its first bytes and no seal at its end.
FORMAT = b"esper_soa checkpoint"
HEAD_BYTES = 512
SEAL = re.compile(rb"\n" + FORMAT + rb" (\d{1,9}) sha256 ([0-9a-f]{64})\n")
MAX_SEAL_BYTES = len(FORMAT) + 92
CHUNK_BYTES = 1 << 20


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or not one of ours."""


class HashingWriter(io.BufferedWriter):
    """A new file that takes the digest of what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None  # why a write failed, which torch does not pass on

    def write(self, content: bytes | memoryview) -> int:  # type: ignore[override]
        """Append `content`."""
        self.digest.update(content)
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


def write_sealed(path: Path, fill: Callable[[BinaryIO], None]) -> None:
    """Replace the file `path` by what `fill` writes and its seal; on a failure the old file stays.

    Raises OSError with its reason where the disk is full or the folder cannot be written.
    """
    try:
        with replacing(path) as temporary, HashingWriter(temporary) as file:
            try:
                fill(file)
            except RuntimeError as error:  # how torch tells that a write failed
                if file.failure is None:
                    raise
                raise file.failure from error
            file.write(b"\n" + FORMAT + b" %d sha256 " % VERSION)
            file.write(file.digest.hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


@contextmanager
def open_sealed(path: Path) -> Iterator[BinaryIO]:
    """The file `path` at its start; raises CheckpointError where its seal does not fit."""
    name = f"checkpoint {one_line(path)}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{name}: not a file")
        with path.open("rb") as file:
            reason = _flaw(file)
            if reason is not None:
                raise CheckpointError(f"{name}: {reason}")
            file.seek(0)
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: there is no such file") from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error.strerror or error})") from error


def why_broken(path: Path) -> str | None:
    """What is wrong with the sealed file `path`, which is named; None where it is whole."""
    try:
        with open_sealed(path):
            return None
    except CheckpointError as error:
        return str(error)


def _flaw(file: BinaryIO) -> str | None:
    """Why the seal of `file` does not fit; None where it does."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_SEAL_BYTES))
    end = file.read()
    seal = SEAL.search(end)
    if seal is None or seal.end() != len(end):
        file.seek(0)
        if FORMAT in file.read(HEAD_BYTES):
            return _other_version(1)
        return "cut off, damaged, or not a checkpoint of this program"
    sealed_bytes = size - len(end) + seal.start(2)
    if _digest(file, sealed_bytes) != seal[2].decode():
        return "damaged (its content is not what was written)"
    if int(seal[1]) != VERSION:
        return _other_version(int(seal[1]))
    return None


def _other_version(version: int) -> str:
    """Why a file of `version` is not read."""
    age = "an older" if version < VERSION else "a newer"
    return (
        f"has version {version}, written by {age} version of the program: this one reads "
        f"version {VERSION}"
    )


def _digest(file: BinaryIO, length: int) -> str:
    """SHA-256 of the first `length` bytes, hexadecimal."""
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, length, CHUNK_BYTES):
        digest.update(file.read(min(CHUNK_BYTES, length - start)))
    return digest.hexdigest()
