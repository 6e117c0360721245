"""Reads CIFAR-10 from its official files: python or binary batches, in a folder or in the .tar.gz
archive.

The files are not trusted: pickles go through an unpickler that knows only inert stand-ins, archives
are read in memory with bounded sizes, and every shape and label is checked. Called by
esper_soa/nets/datasets.py. Needs no torch.
"""

import gzip
import io
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from esper_soa.errors import DataError, one_line
from esper_soa.paths import user_path

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
PYTHON_NAMES = (*TRAIN_FILES, TEST_FILE)
BINARY_NAMES = tuple(f"{name}.bin" for name in PYTHON_NAMES)
PLACES = (
    "cifar-10-batches-py",
    "cifar-10-batches-bin",
    "cifar-10-python.tar.gz",
    "cifar-10-binary.tar.gz",
)

NUM_CLASSES = 10
PIXELS = 3 * 32 * 32  # of one image: 1024 red, then green, then blue, row by row
MAX_FILE_BYTES = 64 << 20  # an official batch has 31 MB
MAX_ARCHIVE_BYTES = 512 << 20  # unpacked; the official archives have about 180 MB
MAX_MEMO = 1 << 20  # entries of a pickle's memo; an official batch has some 10,000
# What the official python batches call themselves. Binary ones have no name.
BATCH_LABELS = {f"data_batch_{number}": f"training batch {number} of 5" for number in range(1, 6)}
BATCH_LABELS[TEST_FILE] = "testing batch 1 of 1"
OFFICIAL_IMAGES = (
    50_000,
    10_000,
)  # of the whole set, for training and for testing: as many of each class
MAX_COMMON = 0.01  # share of the test images that may be training images too
REMEDY = (
    "Fetch CIFAR-10 again from its official page, or set data.name=fashion32 without data.root."
)

_BROKEN_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
)
_BROKEN_ARCHIVE = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error)
_REFUSED_OPCODES = ("BYTEARRAY8", "NEXT_BUFFER", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4")
_MEMO_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT")


class CifarImages(NamedTuple):
    """Content of the files: D training and V test images."""

    train_images: np.ndarray  # uint8 [D, 32, 32, 3]
    train_labels: np.ndarray  # int64 [D], 0 to 9
    test_images: np.ndarray  # uint8 [V, 32, 32, 3]
    test_labels: np.ndarray  # int64 [V], 0 to 9
    place: str  # folder or archive that was read


def read_cifar10(root: str) -> CifarImages:
    """All images of the five training batches, in order, and of the test batch.

    root: the folder of the batches, a folder that holds one of PLACES, or an archive. Batches may
    have any number of images. Raises DataError where something is missing, broken, exchanged or not
    trusted.
    """
    place = locate(user_path("data.root", root))
    files = _read_archive(place) if place.is_file() else _read_folder(place)
    names = BINARY_NAMES if any(name in files for name in BINARY_NAMES) else PYTHON_NAMES
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(f"{place}: CIFAR-10 is incomplete, without {', '.join(missing)}. {REMEDY}")
    parse = parse_binary if names is BINARY_NAMES else parse_pickle
    batches = [parse(files.pop(name), f"{place}: {name}") for name in names]
    found = CifarImages(
        np.concatenate([images for images, _ in batches[:-1]]),
        np.concatenate([labels for _, labels in batches[:-1]]),
        *batches[-1],
        place=str(place),
    )
    check_apart(found)
    return found


def check_apart(found: CifarImages) -> None:
    """Raise DataError where batches stand in for one another, so that testing would be on what was
    trained.
    """
    sizes = len(found.train_labels), len(found.test_labels)
    if sizes == OFFICIAL_IMAGES:
        for labels, part in ((found.train_labels, "training"), (found.test_labels, TEST_FILE)):
            if len(set(np.bincount(labels, minlength=NUM_CLASSES).tolist())) > 1:
                raise DataError(
                    f"{found.place}: the {part} images are not equally many of each class, as in "
                    "CIFAR-10: "
                    f"batch files were exchanged. {REMEDY}"
                )
    seen = [hash(image.tobytes()) for image in found.train_images]
    if len(seen) - len(set(seen)) > MAX_COMMON * len(seen):
        raise DataError(f"{found.place}: training batches hold the same images. {REMEDY}")
    trained = set(seen)
    common = sum(hash(image.tobytes()) in trained for image in found.test_images)
    if common > MAX_COMMON * sizes[1]:
        raise DataError(
            f"{found.place}: {common} images of {TEST_FILE} are training images too. {REMEDY}"
        )


def locate(root: Path) -> Path:
    """The folder of batches or the archive that `root` is or holds; DataError where there is
    none.
    """
    try:
        return _locate(root)
    except OSError as error:
        raise DataError(
            f"data.root={one_line(root)}: cannot be read ({error.strerror}). Check permissions."
        ) from error


def _locate(root: Path) -> Path:
    if root.is_file():
        return root
    if not root.is_dir():
        raise DataError(
            f"data.root={one_line(root)}: no such folder or archive. Name the place of CIFAR-10, "
            "or leave data.root "
            "empty."
        )
    if any((root / name).exists() for name in (*PYTHON_NAMES, *BINARY_NAMES)):
        return root
    for name in PLACES:
        if (root / name).exists():
            return root / name
    raise DataError(
        f"data.root={one_line(root)}: holds no CIFAR-10: neither its batch files nor one of "
        f"{', '.join(PLACES)}. "
        f"{REMEDY}"
    )


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Content of the batch files in `folder` by name; of the binary ones only where there are no
    others.
    """
    names = PYTHON_NAMES if any((folder / name).exists() for name in PYTHON_NAMES) else BINARY_NAMES
    files = {}
    for name in names:
        path = folder / name
        try:
            if not path.exists():
                continue
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                raise DataError(
                    f"{path}: not a file of at most {MAX_FILE_BYTES >> 20} MiB, so no CIFAR-10 "
                    f"batch. {REMEDY}"
                )
            files[name] = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}). Check its permissions."
            ) from error
    return files


def _read_archive(path: Path) -> dict[str, bytes]:
    """Content of the batch files in a .tar or .tar.gz archive by name; nothing is written to
    disk.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            content = stream.read(MAX_ARCHIVE_BYTES + 1)
        if len(content) > MAX_ARCHIVE_BYTES:
            raise DataError(
                f"{path}: unpacks to more than {MAX_ARCHIVE_BYTES >> 20} MiB, so it is not "
                f"CIFAR-10. {REMEDY}"
            )
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return _read_members(archive, path)
    except _BROKEN_ARCHIVE as error:
        raise DataError(f"{path}: not a whole .tar.gz archive ({error}). {REMEDY}") from error


def _read_members(archive: tarfile.TarFile, path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for member in archive:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(
                f"{path}: the member {member.name!r} points outside the archive. {REMEDY}"
            )
        if name.name not in PYTHON_NAMES and name.name not in BINARY_NAMES:
            continue
        if name.name in files:
            raise DataError(f"{path}: holds {name.name} twice. {REMEDY}")
        stream = (
            archive.extractfile(member)
            if member.isreg() and member.size <= MAX_FILE_BYTES
            else None
        )
        if stream is None:
            raise DataError(
                f"{path}: {name.name} is not a plain file of at most {MAX_FILE_BYTES >> 20} "
                "MiB. "
                f"{REMEDY}"
            )
        files[name.name] = stream.read()
        if len(files[name.name]) != member.size:
            raise DataError(f"{path}: {name.name} is truncated. {REMEDY}")
    return files


def parse_binary(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3] and labels int64 [M] of a binary batch: per image one label byte
    and PIXELS bytes.
    """
    if not content or len(content) % (1 + PIXELS):
        raise DataError(
            f"{where} has {len(content)} bytes, not a multiple of {1 + PIXELS}: truncated, or "
            "not "
            f"CIFAR-10. {REMEDY}"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _images(records[:, 1:]), _checked_labels(records[:, 0].astype(np.int64), where)


def parse_pickle(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3] and labels int64 [M] of a python batch, a dict of `data` [M,
    PIXELS] and `labels`.
    """
    _check_opcodes(content, where)
    try:
        batch = _BatchUnpickler(content, where).load()
    except _BROKEN_PICKLE as error:
        raise DataError(
            f"{where} is broken or truncated ({type(error).__name__}: {error}). {REMEDY}"
        ) from error
    if not isinstance(batch, dict):
        raise DataError(f"{where} holds no dictionary, so it is no CIFAR-10 batch. {REMEDY}")
    _check_name(batch.get(b"batch_label", batch.get("batch_label")), where)
    data = batch.get(b"data", batch.get("data"))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise DataError(
            f"{where} lacks `data` or `labels`, so it is no CIFAR-10 batch (CIFAR-100 cannot "
            "be "
            f"used). {REMEDY}"
        )
    if any(type(label) is not int or not 0 <= label < NUM_CLASSES for label in labels):
        raise DataError(f"{where} has a label outside 0 to {NUM_CLASSES - 1}. {REMEDY}")
    pixels = _pixels(data, where)
    if len(labels) != len(pixels):
        raise DataError(f"{where} has {len(pixels)} images but {len(labels)} labels. {REMEDY}")
    return _images(pixels), np.array(labels, np.int64)


def _check_name(label: object, where: str) -> None:
    """Raise DataError where the batch calls itself another one than its file; it need not have a
    name.
    """
    wanted = BATCH_LABELS.get(where.rpartition(" ")[2])
    name = label.decode("latin1") if isinstance(label, bytes) else label
    if name is None or wanted in (None, name):
        return
    told = one_line(name) if isinstance(name, str) else type(name).__name__
    raise DataError(
        f"{where} calls itself {told!r}, not {wanted!r}: batch files were exchanged. {REMEDY}"
    )


def _images(pixels: np.ndarray) -> np.ndarray:
    """uint8 [M, 32, 32, 3] from [M, PIXELS]."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _checked_labels(labels: np.ndarray, where: str) -> np.ndarray:
    if labels.max() >= NUM_CLASSES:
        raise DataError(f"{where} has a label outside 0 to {NUM_CLASSES - 1}. {REMEDY}")
    return labels


def _pixels(array: "_Array", where: str) -> np.ndarray:
    """uint8 [M, PIXELS] from what the pickle says about the array."""
    state = array.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise DataError(f"{where}: the array `data` is malformed. {REMEDY}")
    _, shape, kind, fortran, content = state
    if not isinstance(kind, _Dtype) or kind.name not in ("u1", b"u1", "uint8", b"uint8"):
        raise DataError(f"{where}: `data` does not hold unsigned bytes. {REMEDY}")
    whole = (
        isinstance(shape, tuple) and len(shape) == 2 and all(type(size) is int for size in shape)
    )
    if not whole or shape[0] < 1 or shape[1] != PIXELS:
        raise DataError(
            f"{where}: `data` has shape {str(shape)[:60]}, not [images, {PIXELS}]. {REMEDY}"
        )
    if not isinstance(content, bytes) or len(content) != shape[0] * PIXELS:
        raise DataError(
            f"{where}: `data` does not have the {shape[0]} x {PIXELS} bytes of its shape. {REMEDY}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Array:
    """Stand-in for a numpy array: keeps (version, shape, dtype, fortran order, bytes) as the pickle
    has it.
    """

    def __init__(self) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Dtype:
    """Stand-in for a numpy dtype: keeps its name."""

    def __init__(self, name: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, without meaning for bytes."""


def _new_array(*_arguments: object) -> _Array:
    return _Array()


def _new_dtype(name: object, *_flags: object) -> _Dtype:
    return _Dtype(name)


def _no_bytes() -> bytes:
    return b""


class _BatchUnpickler(pickle.Unpickler):
    """Unpickler of CIFAR-10 batches: the few names that they use become inert stand-ins, any other
    name is refused.
    """

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.where = where
        # characters that may still be encoded, so that a small file stays small
        self.allowance = len(content)
        self.known: dict[tuple[str, str], Callable[..., object] | str] = {
            ("numpy.core.multiarray", "_reconstruct"): _new_array,
            ("numpy._core.multiarray", "_reconstruct"): _new_array,
            ("numpy", "ndarray"): "ndarray",  # only ever an argument of _reconstruct
            ("numpy", "dtype"): _new_dtype,
            ("_codecs", "encode"): self.encode,
            ("__builtin__", "bytes"): _no_bytes,
            ("builtins", "bytes"): _no_bytes,
        }

    def find_class(self, module: str, name: str, /) -> Callable[..., object] | str:
        """The stand-in of a name; DataError for any name that a CIFAR-10 batch does not use."""
        if (module, name) not in self.known:
            raise DataError(
                f"{self.where} asks for {f'{module}.{name}'[:100]}, which no CIFAR-10 batch "
                "does: "
                f"not loaded. {REMEDY}"
            )
        return self.known[module, name]

    def encode(self, text: str, encoding: str | bytes) -> bytes:
        """Bytes that were pickled as text; latin1 only."""
        self.allowance -= len(text)
        if encoding not in ("latin1", b"latin1") or self.allowance < 0:
            raise ValueError("unexpected use of _codecs.encode")
        return text.encode("latin1")


def _check_opcodes(content: bytes, where: str) -> None:
    """Raise DataError for a stream that is not a pickle, or could make the unpickler reserve memory
    without data.
    """
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _REFUSED_OPCODES:
                raise DataError(
                    f"{where} uses the pickle instruction {opcode.name}, which no CIFAR-10 "
                    "batch "
                    f"does. {REMEDY}"
                )
            if opcode.name in _MEMO_OPCODES and not 0 <= int(argument or 0) <= MAX_MEMO:
                raise DataError(
                    f"{where} asks for {argument} memo entries, which no CIFAR-10 batch does. "
                    f"{REMEDY}"
                )
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{where} is broken or truncated, or no pickle ({str(error)[:100]}). {REMEDY}"
        ) from error
