"""Checkpoints: sealed files (checksum.py) of what torch.save writes, so that torch.load reads them
too: nested dictionaries and lists of tensors, numbers and texts, which come back exactly.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from esper_soa.config.registry import RAISED
from esper_soa.system.errors import one_line
from esper_soa.system.transfers import move_leaves
from esper_soa.system.value_types import first, kind_of
from esper_soa.training.files.checksum import CheckpointError, read_sealed, write_sealed

# Errors that torch raises for a content that is foreign, under a seal that fits.
UNREADABLE_ERRORS = (*RAISED, pickle.UnpicklingError, EOFError, MemoryError, BadZipFile)
LARGEST_INTEGER = 2**63 - 1


def save_checkpoint(path: Path, content: Mapping[str, object]) -> None:
    """Replace the file `path` by `content`, all or nothing; raises OSError."""
    archive = io.BytesIO()
    torch.save(move_leaves(dict(content), torch.device("cpu")), archive)
    write_sealed(path, archive.getvalue())


def load_checkpoint(path: Path, device: torch.device) -> dict:
    """The content that was saved to `path`, its tensors on `device`, without running foreign code.

    Raises CheckpointError for a file that is missing, damaged, foreign, of another version, or
    names another class than tensors and plain values of Python.
    """
    name = f"checkpoint {one_line(path)}"
    archive = io.BytesIO(read_sealed(path))
    try:
        _check_sizes(archive)
        content = torch.load(archive, map_location="cpu", weights_only=True)
        if device.type != "cpu":
            content = move_leaves(content, device)
    except UNREADABLE_ERRORS as error:
        reason = f"its content cannot be read or is not trusted ({type(error).__name__})"
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if out_of_memory or "allocate memory" in str(error):
            reason = f"there is not enough memory on {device} to read it"
        raise CheckpointError(f"{name}: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: written by another program")
    return content


def _check_sizes(archive: io.BytesIO) -> None:
    """Raise ValueError for entries that are larger than the archive, which torch.save packs not."""
    with ZipFile(archive) as entries:
        if sum(entry.file_size for entry in entries.infolist()) > len(archive.getbuffer()):
            raise ValueError("packed entries")
    archive.seek(0)


def mismatch(value: object, like: object, place: str) -> str:
    """How `value` is unlike `like` in names, types, shapes, dtypes; finite, counts from 0."""
    if isinstance(like, Mapping) and isinstance(value, Mapping):
        unknown = [name for name in (*like, *value) if name not in like or name not in value]
        if unknown:
            return f"{place} {'lacks' if unknown[0] in like else 'has'} {unknown[0]}"
        return first(mismatch(value[name], part, f"{place}.{name}") for name, part in like.items())
    if not isinstance(like, Tensor) or not isinstance(value, Tensor):
        if type(value) is type(like) is int and 0 <= value <= LARGEST_INTEGER:  # type: ignore[operator]
            return ""
        expected = "a count" if type(like) is int else _kind(like)
        return f"{place} is {_kind(value)} where {expected} is wanted"
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        return f"{place} is {_kind(value)} where {_kind(like)} is wanted"
    finite = bool(torch.isfinite(value).all())
    return "" if finite else f"{place} holds values that are not finite"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return kind_of(value)
