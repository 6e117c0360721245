"""Reads the arrays of an .npz file, some rows at a time, so that a file may be larger than memory.

The file is not trusted: nothing in it is unpickled, and a header must fit the size of its member.
"""

import io
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

from esper_soa.system.errors import DataError, check_data, one_line

NPY_SUFFIX = ".npy"  # of the members of an .npz
HEADER_BYTES = 16_384  # read of a member to find its header, which numpy limits to 10,000
MAX_RATIO = 200  # of the bytes of an array to those of its member, beyond SMALL_BYTES
SMALL_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20  # bytes in work at a time
NUMPY_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # that numpy writes, of bounded memory
SAVE_REMEDY = (
    "Save the arrays anew: numpy.savez('mine.npz', train_images=..., train_labels=..., ...)."
)


class LazyArray(NamedTuple):
    """An array that may be larger than memory."""

    name: str  # what messages call it
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int], Iterator[np.ndarray]]  # parts of whole rows of at most so many bytes

    def whole(self) -> np.ndarray:
        """All of its values."""
        return np.concatenate([*self.rows(CHUNK_BYTES), np.empty((0, *self.shape[1:]), self.dtype)])


def lazy_array(name: str, array: np.ndarray) -> LazyArray:
    """An array in memory."""

    def rows(most_bytes: int) -> Iterator[np.ndarray]:
        at_once = max(1, most_bytes // max(1, array[:1].nbytes))
        for first in range(0, len(array), at_once):
            yield array[first : first + at_once]

    return LazyArray(name, array.shape, array.dtype, rows=rows)


def npz_arrays(
    path: Path, where: str, keys: tuple[str, ...]
) -> tuple[dict[str, LazyArray], list[str]]:
    """The arrays `keys` that the .npz file at `path` holds, unread, by key, and the names of all.
    DataError for what is no file or no plain array; where: what messages call the file.
    """
    with _data_errors(where):
        if path.exists() and not path.is_file():
            raise DataError(f"{where}: is not a file. Name the .npz file itself.")
        with zipfile.ZipFile(path) as archive:
            members = {
                member.filename.removesuffix(NPY_SUFFIX): member for member in archive.infolist()
            }
        stored = [key for key in keys if key in members]
        arrays = {key: _lazy_array(path, members[key], f"{where}: {key}") for key in stored}
        return arrays, list(members)


def _lazy_array(path: Path, member: zipfile.ZipInfo, name: str) -> LazyArray:
    packing = f"{name} is packed by method {member.compress_type}"
    check_data(
        member.compress_type in NUMPY_PACKINGS, packing, "be stored or deflated", remedy=SAVE_REMEDY
    )
    with _data_errors(name), zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        begin = io.BytesIO(stream.read(HEADER_BYTES))
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        # version 3, of records with names, is no key
        shape, fortran, dtype = readers[npy.read_magic(begin)](begin)
    if dtype.hasobject:
        problem = "holds Python objects, which would have to be unpickled and never are"
        convert = "Give all images one shape and convert: numpy.stack(...).astype(numpy.uint8)."
        raise DataError(f"{name} {problem}. {convert} {SAVE_REMEDY}")
    size = member.file_size - begin.tell()
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize != size:
        problem = f"the bytes of its shape {one_line(list(shape))} and type {dtype}, but {size}"
        raise DataError(f"{name} does not have {problem}. {SAVE_REMEDY}")
    num_bytes = member.compress_size
    check_ratio(f"{name} is {num_bytes} bytes that unpack to {size}", num_bytes, size)

    def rows(most_bytes: int) -> Iterator[np.ndarray]:
        left = shape[0]
        row = max(1, math.prod(shape[1:]) * dtype.itemsize)
        # In Fortran order the first index changes fastest, so that a row is all over the array.
        at_once = left if fortran else max(1, most_bytes // row)
        with _data_errors(name), zipfile.ZipFile(path) as file, file.open(member) as stream:
            stream.read(begin.tell())
            while left:
                count = min(left, at_once)
                values = np.frombuffer(stream.read(count * row), dtype)
                yield values.reshape((count, *shape[1:]), order="F" if fortran else "C")
                left -= count

    return LazyArray(name, shape, dtype, rows=rows)


def check_ratio(problem: str, packed: int, size: int) -> None:
    """Raise DataError, which tells the `problem`, where `packed` bytes become `size`, far more."""
    remedy = "Save images with numpy.savez, uncompressed."
    bounded = size <= SMALL_BYTES + MAX_RATIO * packed
    check_data(bounded, problem, f"be at most {MAX_RATIO} times as many", remedy=remedy)


@contextmanager
def _data_errors(where: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{where}: there is no such file. Name the .npz file.") from error
    except PermissionError as error:
        problem = f"{where}: cannot be read ({error.strerror}). Check its permissions."
        raise DataError(problem) from error
    except Exception as error:  # noqa: BLE001 (what readers raise for what is broken or large)
        problem = f"is broken, truncated, encrypted, no .npz or no plain array ({one_line(error)})"
        raise DataError(f"{where}: {problem}. {SAVE_REMEDY}") from error
