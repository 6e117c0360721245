"""Reads CIFAR-10 from its official files: python or binary batches, a folder or the .tar.gz.

The files are not trusted: a pickle can make nothing but texts, numbers and inert stand-ins,
archives are read in memory with bounded sizes, and every shape and label is checked.
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

PYTHON_NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BINARY_NAMES = tuple(f"{name}.bin" for name in PYTHON_NAMES)
# What python batches call themselves, in this order. Binary ones have no name.
BATCH_LABELS = (
    *(f"training batch {number} of 5" for number in range(1, 6)),
    "testing batch 1 of 1",
)
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
# Tuples of a pickle, one in the other at worst, which C hashes on its stack; a batch whose texts
# are pickled as bytes has one per image.
MAX_TUPLES = 20_000
OFFICIAL_IMAGES = (50_000, 10_000)  # of the whole set, for training and test: as many of each class
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
_BROKEN_ARCHIVE = (tarfile.TarError, gzip.BadGzipFile, EOFError, ValueError, zlib.error)
# They look up or reserve what the file does not hold; no batch has them.
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
    path = user_path("data.root", root)
    try:
        place = _locate(path)
        files = _read_archive(place) if place.is_file() else _read_folder(place)
    except _BROKEN_ARCHIVE as error:
        raise _fault(f"{path}: not a whole .tar.gz archive ({one_line(error)})") from error
    except OSError as error:
        told = f"data.root={one_line(path)}: cannot be read ({one_line(error)}). Check permissions."
        raise DataError(told) from error
    binary = any(name in files for name in BINARY_NAMES)
    names = BINARY_NAMES if binary else PYTHON_NAMES
    missing = [name for name in names if name not in files]
    if missing:
        raise _fault(f"{place}: CIFAR-10 is incomplete, without {', '.join(missing)}")
    parse = parse_binary if binary else parse_pickle
    batches = [parse(files.pop(name), f"{place}: {name}") for name in names]
    images = np.concatenate([images for images, _ in batches[:-1]])
    labels = np.concatenate([labels for _, labels in batches[:-1]])
    found = CifarImages(images, labels, *batches[-1], place=str(place))
    check_apart(found)
    return found


def check_apart(found: CifarImages) -> None:
    """Raise DataError where batches stand in for one another: tests would be of trained images."""
    sizes = len(found.train_labels), len(found.test_labels)
    for labels, part in ((found.train_labels, "training"), (found.test_labels, "test_batch")):
        if sizes == OFFICIAL_IMAGES and np.ptp(np.bincount(labels, minlength=NUM_CLASSES)):
            raise _fault(
                f"{found.place}: the {part} images are not equally many of each class, as in "
                "CIFAR-10: batch files were exchanged"
            )
    seen = [hash(image.tobytes()) for image in found.train_images]
    trained = set(seen)
    if len(seen) - len(trained) > MAX_COMMON * len(seen):
        raise _fault(f"{found.place}: training batches hold the same images")
    common = sum(hash(image.tobytes()) in trained for image in found.test_images)
    if common > MAX_COMMON * sizes[1]:
        raise _fault(f"{found.place}: {common} images of test_batch are training images too")


def _fault(text: str) -> DataError:
    return DataError(f"{text}. {REMEDY}")


def _locate(root: Path) -> Path:
    """The folder of batches or the archive that `root` is or holds."""
    if root.is_file() or any((root / name).exists() for name in PYTHON_NAMES + BINARY_NAMES):
        return root
    if not root.is_dir():
        raise DataError(
            f"data.root={one_line(root)}: no such folder or archive. Name the place of CIFAR-10, "
            "or leave data.root empty."
        )
    for name in PLACES:
        if (root / name).exists():
            return root / name
    raise _fault(
        f"data.root={one_line(root)}: holds no CIFAR-10: neither its batch files nor one of "
        f"{', '.join(PLACES)}"
    )


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Content of the batch files by name; of the binary ones only where there are no others."""
    python = any((folder / name).exists() for name in PYTHON_NAMES)
    files = {}
    for name in PYTHON_NAMES if python else BINARY_NAMES:
        path = folder / name
        if path.exists():
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                raise _fault(f"{path}: not a file of at most {MAX_FILE_BYTES >> 20} MiB")
            files[name] = path.read_bytes()
    return files


def _read_archive(path: Path) -> dict[str, bytes]:
    """Content of the batch files in a .tar or .tar.gz archive by name, wherever they lie in it;
    nothing is written to disk.
    """
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as stream:
        content = stream.read(MAX_ARCHIVE_BYTES + 1)
    if len(content) > MAX_ARCHIVE_BYTES:
        raise _fault(f"{path}: unpacks to more than {MAX_ARCHIVE_BYTES >> 20} MiB")
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name not in PYTHON_NAMES + BINARY_NAMES:
                continue
            plain = member.isreg() and member.size <= MAX_FILE_BYTES  # a link would be followed
            opened = archive.extractfile(member) if plain else None
            if opened is None:
                raise _fault(
                    f"{path}: {name} is not a plain file of at most {MAX_FILE_BYTES >> 20} MiB"
                )
            if name in files:
                raise _fault(f"{path}: holds {name} twice")
            files[name] = opened.read()
    return files


def parse_binary(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3], labels int64 [M] of a binary batch: label byte, PIXELS bytes."""
    if not content or len(content) % (1 + PIXELS):
        raise _fault(
            f"{where} has {len(content)} bytes, not a multiple of {1 + PIXELS}: truncated, or "
            "not CIFAR-10"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:], records[:, 0].tolist(), where)


def parse_pickle(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3], labels int64 [M] of a dict: `data` [M, PIXELS] and `labels`."""
    try:
        tuples = 0
        for opcode, argument, _ in pickletools.genops(content):
            tuples += opcode.name.startswith("TUPLE")
            memo = int(argument or 0) if opcode.name in _MEMO_OPCODES else 0
            if opcode.name in _REFUSED_OPCODES or not 0 <= memo <= MAX_MEMO:
                raise ValueError(f"instruction {opcode.name} {one_line(argument)}")
            if tuples > MAX_TUPLES:
                raise ValueError(f"more than {MAX_TUPLES} tuples")
        batch = _BatchUnpickler(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(batch, dict):
            raise ValueError("no dictionary")
        text = {_text(key): value for key, value in batch.items()}
        name = _text(text.get("batch_label"))
        data = text.get("data")
        labels = text.get("labels")
        if not isinstance(data, _Kept) or not isinstance(labels, list):
            raise ValueError("lacks `data` or `labels`; CIFAR-100 cannot be used")
        pixels = _pixels(data.state)
    except _BROKEN_PICKLE as error:
        told = f"{where} is broken or truncated, or no CIFAR-10 batch ({one_line(error)})"
        raise _fault(told) from error
    file = where.rpartition(" ")[2]
    wanted = BATCH_LABELS[PYTHON_NAMES.index(file)] if file in PYTHON_NAMES else name
    if name not in (None, wanted):
        told = repr(one_line(name)) if isinstance(name, str) else type(name).__name__
        raise _fault(f"{where} calls itself {told}, not {wanted!r}: batch files were exchanged")
    return _checked(pixels, labels, where)


def _text(value: object) -> object:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _checked(pixels: np.ndarray, labels: list, where: str) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [M, 32, 32, 3] from [M, PIXELS], and int64 [M]."""
    if len(labels) != len(pixels):
        raise _fault(f"{where} has {len(pixels)} images but {len(labels)} labels")
    if any(type(label) is not int or not 0 <= label < NUM_CLASSES for label in labels):
        raise _fault(f"{where} has a label outside 0 to {NUM_CLASSES - 1}")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.int64)


def _pixels(state: object) -> np.ndarray:
    """uint8 [M, PIXELS] from the state of an array: version, shape, dtype, Fortran order, values.

    Raises ValueError where it is of another type or shape, or does not hold the bytes of its shape.
    """
    _, shape, kind, fortran, content = state if isinstance(state, tuple) else ()
    if not isinstance(kind, _Kept) or _text(kind.made_of[0]) not in ("u1", "uint8"):
        raise ValueError("`data` does not hold unsigned bytes")
    images, pixels = shape
    if type(images) is not int or images < 1 or type(pixels) is not int or pixels != PIXELS:
        raise ValueError(f"`data` is not of shape [images, {PIXELS}]")
    values = content.encode("latin1") if isinstance(content, str) else content
    if not isinstance(values, bytes) or len(values) != images * PIXELS:
        raise ValueError(f"`data` does not have the {images} x {PIXELS} bytes of its shape")
    return np.frombuffer(values, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Kept:
    """An array or a dtype as the pickle describes it: nothing is made of that."""

    made_of: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *made_of: object) -> None:
        self.made_of = made_of

    def __setstate__(self, state: object) -> None:
        self.state = state


class _BatchUnpickler(pickle.Unpickler):
    """Unpickler of CIFAR-10 batches: any name but the few that they use is refused."""

    def find_class(self, module: str, name: str, /) -> Callable[..., object] | str:
        """What stands in for a name."""
        full = f"{module}.{name}"
        if full in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
            return _Kept
        if full == "numpy.dtype":
            return _Kept
        if full == "numpy.ndarray":
            return "ndarray"  # only ever an argument of _reconstruct
        if full in ("_codecs.encode", "__builtin__.bytes", "builtins.bytes"):
            # Bytes that were pickled as text stay one: encoding one text many times takes memory.
            return lambda *given: given[0] if given else ""
        raise ValueError(f"it asks for {full[:100]}, which no CIFAR-10 batch does: not loaded")
