"""Checkpoints: one file of plain tensors and numbers, replaced atomically, read without running foreign code.

The trainer says what goes in (nested dictionaries and lists of tensors, numbers and texts; a TensorDict goes in as
`.to_dict()`) and takes the same back.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from esper_soa.errors import UserError

FORMAT = "esper_soa checkpoint"
VERSION = 1
# What zipfile and torch raise for files that are cut off, foreign, or made to break the reader.
UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, BadZipFile)
Content: TypeAlias = (
    None | bool | int | float | str | Tensor | list["Content"] | tuple["Content", ...] | dict[str, "Content"]
)


class CheckpointError(UserError):
    """A checkpoint is missing, broken, or not one of ours."""


def save_checkpoint(path: Path, content: Mapping[str, Content]) -> None:
    """Replace the file `path` by `content`, all or nothing: whatever fails, the old file stays whole.

    Raises OSError where the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, "content": dict(content)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except RuntimeError as error:
        raise OSError(f"{path}: the checkpoint could not be written ({_first_line(error)})") from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Content]:
    """The content that was saved to `path`, its tensors on `device`.

    Only tensors and plain Python values are read; a file that names any other class is refused.
    Raises CheckpointError for a file that is missing, cut off, foreign, or of another version.
    """
    try:
        damaged = _damaged_member(path)
        if damaged is not None:
            raise CheckpointError(f"checkpoint {path}: damaged (checksum of {damaged} does not fit)")
        record = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: there is no such file") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"checkpoint {path}: not trusted or broken ({_first_line(error)})") from error
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path}: cut off or not a checkpoint ({_first_line(error)})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: written by another program")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {path}: has version {record.get('version')}, this program reads version {VERSION}"
        )
    return record["content"]


def _damaged_member(path: Path) -> str | None:
    """The first part of the file whose checksum does not fit, which torch does not look at; None where all do."""
    with ZipFile(path) as parts:
        return parts.testzip()


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
