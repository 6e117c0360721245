"""Arrays that are slow to make, kept in the user's cache folder under names that are digests."""

import hashlib
from pathlib import Path

import numpy as np

from esper_soa.system.caches import FolderError, cache_folder, open_folder
from esper_soa.system.errors import DataError
from esper_soa.system.plain_files import remove, replacing

SEAL_BYTES = 32  # before the numbers of a file: their sha256


def kept_folder(name: str) -> Path:
    """The folder of this name in the cache folder; DataError where there can be none."""
    try:
        path = cache_folder() / name
        open_folder(path)
    except FolderError as error:
        raise DataError(f"{name} cannot be kept: {error}") from error
    return path.resolve()


def keep(path: Path, array: np.ndarray) -> None:
    """Replace the file by the array; DataError where that cannot be."""
    try:
        remove(path)  # whatever is there is not that array
        with replacing(path) as draft:
            draft.write(hashlib.sha256(array.data).digest())
            array.tofile(draft)
    except OSError as error:
        raise DataError(f"{path}: cannot be kept ({error.strerror})") from error


def kept(path: Path, dtype: np.dtype) -> np.ndarray | None:
    """The numbers [M] of the file, mapped; None where there is none, or something else."""
    try:
        if not path.is_file():  # to open a pipe would wait for its other end
            return None
        stored = np.memmap(path, np.uint8, "c")
        numbers = stored[SEAL_BYTES:].view(dtype)
    except (OSError, ValueError):  # ValueError: nothing is in it, or part of a number
        return None
    seal = stored[:SEAL_BYTES].tobytes()
    return numbers if numbers.size and seal == hashlib.sha256(numbers.data).digest() else None
