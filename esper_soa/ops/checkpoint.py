"""Checkpoints: one sealed file of plain tensors and numbers, read without running foreign code.

What goes in (nested dictionaries and lists of tensors, numbers and texts) comes back the same. Seal
and atomic replacement are those of sealed.py; within the seal lies what torch.save writes, so
torch.load reads it too. `misfit` and `unlike` say where what came back is not what is needed.
"""

import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TypeAlias, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from esper_soa.errors import one_line
from esper_soa.ops.sealed import CheckpointError, open_sealed, write_sealed

# What torch raises for a content that is foreign, or made to break the reader, under a seal that
# fits.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    MemoryError,
    struct.error,
)
ARCHIVE = b"PK\x03\x04"  # how the files of torch.save begin
MAX_DEPTH = 30  # of nesting; a checkpoint of ours has less than 10
LARGEST = 2**63 - 1
Content: TypeAlias = (
    None
    | bool
    | int
    | float
    | str
    | Tensor
    | list["Content"]
    | tuple["Content", ...]
    | dict[str, "Content"]
)


def save_checkpoint(path: Path, content: Mapping[str, Content]) -> None:
    """Replace the file `path` by `content`, all or nothing: on a failure the old file stays whole.

    Raises OSError with its reason where the disk is full or the folder cannot be written.
    """
    write_sealed(path, partial(torch.save, dict(content)))


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Content]:
    """The content that was saved to `path`, its tensors on `device`.

    Only tensors and plain Python values are read; a file that names any other class is refused.
    Raises CheckpointError for a file that is missing, damaged, foreign, or of another version.
    """
    name = f"checkpoint {one_line(path)}"
    try:
        with open_sealed(path) as file:
            if file.read(len(ARCHIVE)) != ARCHIVE:
                raise CheckpointError(f"{name}: written by another program")
            file.seek(0)
            content = torch.load(file, map_location=device, weights_only=True)
            if not isinstance(content, dict):
                raise CheckpointError(f"{name}: written by another program")
            plain = _Plain(device, file.seek(0, 2))
    except UNREADABLE as error:
        no_room = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if no_room or "allocate memory" in str(error):
            words = f"{name}: there is not enough memory on {device} to read it"
            raise CheckpointError(words) from error
        raise CheckpointError(
            f"{name}: its content cannot be read or is not trusted ({type(error).__name__})"
        ) from error
    try:
        return cast(dict[str, Content], plain.copy(content))
    except ValueError as error:
        words = f"{name}: {error}, which no checkpoint of this program does"
        raise CheckpointError(words) from error


class _Plain:
    """Copies a content value by value and refuses what `save_checkpoint` would not have written."""

    def __init__(self, device: torch.device, limit: int) -> None:
        """limit: values that there may be; a pickle that refers to itself could multiply them."""
        self.device = device
        self.left = limit

    def copy(self, value: object, depth: int = 0) -> Content:
        """`value`, containers copied; raises ValueError with what no checkpoint of ours holds."""
        self.left -= 1
        if depth > MAX_DEPTH or self.left < 0:
            raise ValueError("is nested too deeply")
        if isinstance(value, dict):
            if not all(type(key) is str for key in value):
                raise ValueError("holds a key or text that is none")
            keys = [str(self.copy(key)) for key in value]
            copies = [self.copy(one, depth + 1) for one in value.values()]
            return dict(zip(keys, copies, strict=True))
        if type(value) in (list, tuple):
            return type(value)(self.copy(one, depth + 1) for one in value)  # type: ignore
        if type(value) is Tensor:
            self.check_tensor(value)
            return value.detach()
        if type(value) is str and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError("holds a key or text that is none")
        if type(value) is int and not -LARGEST <= value <= LARGEST:
            raise ValueError("holds an integer beyond 64 bits")
        if value is not None and type(value) not in (bool, int, float, str):
            raise ValueError(f"holds a {type(value).__name__}")
        return cast(Content, value)

    def check_tensor(self, value: Tensor) -> None:
        """Refuse all but an ordinary tensor of numbers in memory of its own."""
        plain = value.layout == torch.strided and not value.is_quantized
        if not plain or value.device.type != self.device.type:
            raise ValueError("holds a tensor that is not of plain numbers")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError("holds a tensor that is larger than its memory")


def misfit(value: object, kind: object, place: str) -> str:
    """Where the plain `value` is not of the type `kind` (of lists, dictionaries and records), in
    words; empty where it is. An int serves as a float.
    """
    inside = get_args(kind)
    parts: Iterable[tuple[object, object, object]] = ()
    if isinstance(kind, UnionType):
        return min((misfit(value, one, place) for one in inside), key=len)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        foreign = sorted(hints.keys() ^ value.keys())
        if foreign:
            return f"{place} {'lacks' if foreign[0] in hints else 'has'} {foreign[0]}"
        parts = ((name, value[name], hint) for name, hint in hints.items())
    elif type(value) is not (get_origin(kind) or kind) and (type(value), kind) != (int, float):
        return f"{place} is {_kind(value)}"
    elif inside and isinstance(value, list | dict):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        parts = ((name, one, inside[-1]) for name, one in named)
    return _first(misfit(one, sub, f"{place}.{name}") for name, one, sub in parts)


def unlike(value: object, like: object, place: str) -> str:
    """How `value` is unlike `like` in names, types, shapes, dtypes; finite, counts from 0."""
    if isinstance(like, Mapping) and isinstance(value, Mapping):
        foreign = [name for name in (*like, *value) if name not in like or name not in value]
        if foreign:
            return f"{place} {'lacks' if foreign[0] in like else 'has'} {foreign[0]}"
        return _first(unlike(value[name], part, f"{place}.{name}") for name, part in like.items())
    if not isinstance(like, Tensor) or not isinstance(value, Tensor):
        if type(value) is type(like) is int and 0 <= value <= LARGEST:  # type: ignore[operator]
            return ""
        wanted = "a count" if type(like) is int else _kind(like)
        return f"{place} is {_kind(value)} where {wanted} is wanted"
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        return f"{place} is {_kind(value)} where {_kind(like)} is wanted"
    finite = bool(torch.isfinite(value).all())
    return "" if finite else f"{place} holds values that are not finite"


def _first(faults: Iterable[str]) -> str:
    return next(filter(None, faults), "")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    plain = type(value) in (bool, int, float) or value is None
    return repr(value) if plain else f"a {type(value).__name__}"
