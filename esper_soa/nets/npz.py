"""Reads the arrays of an .npz file, some rows at a time, so that a file may be larger than memory.

The file is not trusted: nothing in it is unpickled, and a header is believed only where it fits the
size of its member. Every fault is a DataError that begins with what the caller calls the file.
Called by image_preparation.py; no torch.
"""

import hashlib
import io
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from esper_soa.errors import DataError, one_line

SUFFIX = ".npy"  # of the members of an .npz
HEADER_BYTES = 16_384  # read of a member to find its header, which numpy limits to 10,000
# of one array; the largest of MedMNIST, 224 pixels a side, has 13 GiB
MAX_UNPACKED_BYTES = 32 << 30
MAX_WHOLE_BYTES = 4 << 30  # of an array that has to be in memory as a whole
ZIP_START = b"PK"
NPY_START = b"\x93NUMPY"
REMEDY = "Save the arrays anew: numpy.savez('mine.npz', train_images=..., train_labels=..., ...)."

_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    KeyError,
)
_BAD_HEADER = (
    ValueError,
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    OverflowError,
    EOFError,
    tokenize.TokenError,
)


class Header(NamedTuple):
    """What an .npy member says of its array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool  # the first index changes fastest
    start: int  # bytes of the member before the values


class Npz:
    """An open .npz file: which arrays it holds, and their rows. Made by `open_npz`."""

    def __init__(self, file: io.BufferedReader, archive: zipfile.ZipFile, where: str) -> None:
        self.file = file
        self.archive = archive
        self.where = where
        counts = Counter(info.filename for info in archive.infolist())
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise DataError(f"{where}: holds {one_line(twice[0])} twice. {REMEDY}")
        self.names = tuple(name.removesuffix(SUFFIX) for name in counts if name.endswith(SUFFIX))

    def sha256(self) -> str:
        """Of the whole file, hexadecimal."""
        with _reading(self.where):
            self.file.seek(0)
            return hashlib.file_digest(self.file, "sha256").hexdigest()

    def header(self, name: str) -> Header:
        """Shape and type of the array `name`, which is there; raises DataError for what is no plain
        array.
        """
        where = f"{self.where}: {one_line(name)}"
        with _reading(where):
            size = self.archive.getinfo(name + SUFFIX).file_size
            with self.archive.open(name + SUFFIX) as stream:
                begin = io.BytesIO(stream.read(HEADER_BYTES))
        header = _parse(begin, where)
        if header.dtype.hasobject:
            raise DataError(
                f"{where} holds Python objects, which would have to be unpickled and never are. "
                "Give all images one "
                f"shape and convert: numpy.stack(...).astype(numpy.uint8). {REMEDY}"
            )
        values = math.prod(header.shape) * header.dtype.itemsize
        if values > MAX_UNPACKED_BYTES:
            raise DataError(
                f"{where} has shape {list(header.shape)} and {values / 2**30:.1f} GiB: must have "
                "at most "
                f"{MAX_UNPACKED_BYTES >> 30} GiB. Give smaller or fewer images."
            )
        if header.start + values != size:
            raise DataError(
                f"{where} does not have the {values} bytes of its shape {list(header.shape)}. "
                f"{REMEDY}"
            )
        return header

    def rows(self, name: str, most_bytes: int) -> Iterator[np.ndarray]:
        """The array `name` in parts of whole rows, none larger than `most_bytes` or one row;
        read-only.
        """
        header = self.header(name)
        where = f"{self.where}: {one_line(name)}"
        row = max(1, math.prod(header.shape[1:]) * header.dtype.itemsize)
        left = header.shape[0]
        at_once = max(1, most_bytes // row)
        if header.fortran:
            at_once = left
            if left * row > MAX_WHOLE_BYTES:
                raise DataError(
                    f"{where} is in Fortran order and larger than {MAX_WHOLE_BYTES >> 30} GiB. "
                    f"Save numpy.ascontiguousarray of it. {REMEDY}"
                )
        with _reading(where), self.archive.open(name + SUFFIX) as stream:
            stream.read(header.start)
            while left:
                count = min(left, at_once)
                values = np.frombuffer(_exactly(stream, count * row), header.dtype)
                left -= count
                yield values.reshape(
                    (count, *header.shape[1:]), order="F" if header.fortran else "C"
                )

    def whole(self, name: str, most_bytes: int) -> np.ndarray:
        """The array `name`; raises DataError where it has more than `most_bytes` bytes."""
        header = self.header(name)
        if math.prod(header.shape) * header.dtype.itemsize > most_bytes:
            raise DataError(
                f"{self.where}: {one_line(name)} has shape {list(header.shape)} and type "
                f"{header.dtype}: "
                f"must have at most {most_bytes >> 20} MiB."
            )
        if not header.shape or not header.shape[0]:
            return np.empty(header.shape, header.dtype)
        return np.concatenate(list(self.rows(name, most_bytes)))


@contextmanager
def open_npz(path: Path, where: str) -> Iterator[Npz]:
    """The .npz file at `path`, which messages call `where`; raises DataError where it is none."""
    with _reading(where):
        if path.exists() and not path.is_file():
            raise DataError(f"{where}: is not a file. Name the .npz file itself.")
        file = path.open("rb")
    with file:
        with _reading(where):
            start = file.read(len(NPY_START))
            file.seek(0)
        if start == NPY_START:
            raise DataError(f"{where}: is one .npy array, not an .npz of several. {REMEDY}")
        if not start.startswith(ZIP_START):
            raise DataError(
                f"{where}: is not an .npz file, which is a zip archive of .npy arrays. {REMEDY}"
            )
        with _reading(where):
            archive = zipfile.ZipFile(file)
        with archive:
            yield Npz(file, archive, where)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Raise DataError for what goes wrong with the file in the context."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{where}: there is no such file. Name the .npz file.") from error
    except PermissionError as error:
        raise DataError(
            f"{where}: cannot be read ({error.strerror}). Check its permissions."
        ) from error
    except _BROKEN as error:
        raise DataError(
            f"{where}: is broken, truncated or encrypted ({one_line(error)}). {REMEDY}"
        ) from error


def _parse(begin: io.BytesIO, where: str) -> Header:
    """The header at the start of a member; numpy reads it as a literal, without running
    anything.
    """
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(begin)
        if version not in readers:
            raise ValueError(f"version {version} is for records with names")
        shape, fortran, dtype = readers[version](begin)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape}")
    except _BAD_HEADER as error:
        raise DataError(f"{where} is no plain array ({one_line(error)}). {REMEDY}") from error
    return Header(
        tuple(int(size) for size in shape), dtype, fortran and len(shape) > 1, begin.tell()
    )


def _exactly(stream: IO[bytes], size: int) -> bytes:
    """The next `size` bytes; raises EOFError where there are fewer."""
    content = stream.read(size)
    if len(content) != size:
        raise EOFError(f"{size - len(content)} bytes are missing")
    return content
