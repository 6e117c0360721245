"""Sealed files: a content, then one line with the version and a SHA-256 of everything before it.

A file appears under its name only when it is whole on the disk, and one changed, missing or added
bit anywhere is found. Needs no torch.
"""

import hashlib
import os
import re
from pathlib import Path

from esper_soa.system.errors import UserError, one_line
from esper_soa.system.files import reason_of, write_bytes
from esper_soa.system.plain_files import open_plain

# 3: the policy's weights are shared by all slots; in 2 their shapes went by the number of slots.
SEAL_VERSION = 3
SEAL_FORMAT = b"esper_soa checkpoint"
SEAL_LINE = re.compile(rb"\n" + SEAL_FORMAT + rb" (\d+) sha256 ([0-9a-f]{64})\n\Z")
SEAL_BYTES = len(SEAL_FORMAT) + 92  # at most


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or not one of ours."""


def write_sealed(path: Path, content: bytes) -> None:
    """Replace the file `path` by `content` and its seal, all or nothing; raises OSError."""
    signed = content + b"\n" + SEAL_FORMAT + b" %d sha256 " % SEAL_VERSION
    write_bytes(path, signed + hashlib.sha256(signed).hexdigest().encode() + b"\n")


def read_sealed(path: Path) -> bytes:
    """The content of the file `path`; raises CheckpointError where its seal does not fit."""
    name = f"checkpoint {one_line(path)}"
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            end = file.seek(max(0, file.seek(0, os.SEEK_END) - SEAL_BYTES))
            seal = SEAL_LINE.search(file.read())
            if seal is None:
                problem = "cut off, damaged, or not a checkpoint of this program"
                raise CheckpointError(f"{name}: {problem}")
            file.seek(0)
            content = file.read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: there is no such file") from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({reason_of(error)})") from error
    if hashlib.sha256(content[: end + seal.start(2)]).hexdigest() != seal[2].decode():
        raise CheckpointError(f"{name}: damaged (its content is not what was written)")
    if int(seal[1]) != SEAL_VERSION:
        problem = f"has version {int(seal[1])}: this program reads version {SEAL_VERSION}"
        raise CheckpointError(f"{name}: {problem}")
    return content[: end + seal.start()]


def find_damage(path: Path) -> str | None:
    """The fault of the sealed file `path`, which is named; None where it is whole."""
    try:
        read_sealed(path)
    except CheckpointError as error:
        return str(error)
    return None
