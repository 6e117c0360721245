"""Checkpoints: one sealed file of plain tensors and numbers, read without running foreign code.

The trainer says what goes in (nested dictionaries and lists of tensors, numbers and texts; a
TensorDict goes in as `.to_dict()`) and takes the same back. Seal and atomic replacement are those
of sealed.py; within the seal lies what torch.save writes, so torch.load reads it too.
"""

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

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
    """Replace the file `path` by `content`, all or nothing: whatever fails, the old file stays
    whole.

    Raises OSError with its reason where the disk is full or the folder cannot be written.
    """

    def fill(file: BinaryIO) -> None:
        torch.save(dict(content), file)

    write_sealed(path, fill)


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
            return _Plain(name, device, file.seek(0, 2)).dictionary(content)
    except UNREADABLE as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
            error
        ):
            raise CheckpointError(
                f"{name}: there is not enough memory on {device} to read it"
            ) from error
        raise CheckpointError(
            f"{name}: its content cannot be read or is not trusted ({type(error).__name__})"
        ) from error


class _Plain:
    """Copies a content value by value and refuses what `save_checkpoint` would not have written."""

    def __init__(self, name: str, device: torch.device, limit: int) -> None:
        """limit: values that there may be, which a pickle that refers to its own parts could
        multiply.
        """
        self.name = name
        self.device = device
        self.left = limit

    def dictionary(self, value: object, depth: int = 0) -> dict[str, Content]:
        """`value` as a plain dictionary with texts as keys."""
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.name}: written by another program")
        return {self.text(key): self.copy(item, depth + 1) for key, item in value.items()}

    def copy(self, value: object, depth: int) -> Content:
        """`value`, containers copied."""
        self.left -= 1
        if depth > MAX_DEPTH or self.left < 0:
            raise self.refusal("is nested too deeply")
        if isinstance(value, dict):
            return self.dictionary(value, depth)
        if type(value) is list:
            return [self.copy(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self.copy(item, depth + 1) for item in value)
        if type(value) is str:
            return self.text(value)
        if type(value) is Tensor:
            return self.tensor(value)
        if type(value) is int and not -LARGEST <= value <= LARGEST:
            raise self.refusal("holds an integer beyond 64 bits")
        if value is not None and type(value) not in (bool, int, float):
            raise self.refusal(f"holds a {type(value).__name__}")
        return cast(Content, value)

    def text(self, value: object) -> str:
        """`value`, a text that can be written to files of ours."""
        if type(value) is not str or any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self.refusal("holds a key or text that is none")
        return value

    def tensor(self, value: Tensor) -> Tensor:
        """`value`, an ordinary tensor of numbers in memory of its own."""
        if (
            value.layout != torch.strided
            or value.is_quantized
            or value.device.type != self.device.type
        ):
            raise self.refusal("holds a tensor that is not of plain numbers")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise self.refusal("holds a tensor that is larger than its memory")
        return value.detach()

    def refusal(self, what: str) -> CheckpointError:
        """The error to raise."""
        return CheckpointError(f"{self.name}: {what}, which no checkpoint of this program does")
