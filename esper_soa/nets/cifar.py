"""Reads CIFAR-10 from its official files: python or binary batches, a folder or the .tar.gz.

The files are not trusted: of a pickle only the texts and numbers are read and nothing is carried
out, archives are read in memory with bounded sizes, and every size and label is checked.
"""

import gzip
import io
import pickletools
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from esper_soa.errors import DataError, one_line
from esper_soa.paths import user_path

PYTHON_NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BINARY_NAMES = tuple(f"{name}.bin" for name in PYTHON_NAMES)
# What python batches call themselves, in this order. Binary ones have no name.
BATCH_LABELS = (*(f"training batch {n} of 5" for n in range(1, 6)), "testing batch 1 of 1")
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
MAX_COMMON = 0.01  # share of the test images that may be training images too
REMEDY = (
    "Fetch CIFAR-10 again from its official page, or set data.name=fashion32 without data.root."
)
_BROKEN_ARCHIVE = (tarfile.TarError, gzip.BadGzipFile, EOFError, ValueError, zlib.error)


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
    _check_apart(images, batches[-1][0], str(place))
    return CifarImages(images, labels, *batches[-1], place=str(place))


def _check_apart(train: np.ndarray, test: np.ndarray, place: str) -> None:
    """Raise DataError where batches stand in for one another: tests would be of trained images."""
    trained = {hash(image.tobytes()) for image in train}
    if len(train) - len(trained) > MAX_COMMON * len(train):
        raise _fault(f"{place}: training batches hold the same images")
    common = sum(hash(image.tobytes()) in trained for image in test)
    if common > MAX_COMMON * len(test):
        raise _fault(f"{place}: {common} images of test_batch are training images too")


def _fault(text: str) -> DataError:
    return DataError(f"{text}. {REMEDY}")


def _locate(root: Path) -> Path:
    """The folder of batches or the archive that `root` is or holds."""
    if root.is_file() or any((root / name).exists() for name in PYTHON_NAMES + BINARY_NAMES):
        return root
    if not root.is_dir():
        remedy = "Name the place of CIFAR-10, or leave data.root empty."
        raise DataError(f"data.root={one_line(root)}: no such folder or archive. {remedy}")
    for name in PLACES:
        if (root / name).exists():
            return root / name
    told = f"holds no CIFAR-10: neither its batch files nor one of {', '.join(PLACES)}"
    raise _fault(f"data.root={one_line(root)}: {told}")


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
    """Content of the batch files in a .tar or .tar.gz archive by name, wherever they lie in it."""
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
                most = MAX_FILE_BYTES >> 20
                raise _fault(f"{path}: {name} is not a plain file of at most {most} MiB")
            if name in files:
                raise _fault(f"{path}: holds {name} twice")
            files[name] = opened.read()
    return files


def parse_binary(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3], labels int64 [M] of a binary batch: label byte, PIXELS bytes."""
    if not content or len(content) % (1 + PIXELS):
        told = f"{len(content)} bytes, not a multiple of {1 + PIXELS}"
        raise _fault(f"{where} has {told}: truncated, or not CIFAR-10")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:], records[:, 0].tolist(), where)


def parse_pickle(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [M, 32, 32, 3], labels int64 [M] of a dict: `data` [M, PIXELS] and `labels`.

    The instructions of the pickle are not carried out. Labels are the numbers behind the text
    `labels`; data are the longest text, in the memory of an array of unsigned bytes.
    """
    texts = [""]
    labels = []
    data = ""
    order = fortran = False
    try:
        for opcode, argument, _ in pickletools.genops(content):
            text = argument.decode("latin1") if isinstance(argument, bytes) else argument
            if isinstance(text, str) and text != "latin1":  # as bytes are pickled: text, encoding
                texts.append(text)
                if len(text) > len(data):
                    data = text
                    fortran = order
            elif opcode.name in ("NEWTRUE", "NEWFALSE"):  # the last before data is its order
                order = opcode.name == "NEWTRUE"
            elif texts[-1] == "labels" and opcode.name in ("INT", "BININT", "BININT1", "BININT2"):
                labels.append(argument)
        if "labels" not in texts or "data" not in texts:
            raise ValueError("lacks `data` or `labels`; CIFAR-100 cannot be used")
        values = data.encode("latin1")
        if not {"u1", "uint8"} & set(texts) or len(values) % PIXELS:
            raise ValueError(f"`data` does not hold unsigned bytes of shape [images, {PIXELS}]")
    except ValueError as error:
        told = f"{where} is broken or truncated, or no CIFAR-10 batch ({one_line(error)})"
        raise _fault(told) from error
    _check_name(texts, where)
    shape = len(values) // PIXELS, PIXELS
    pixels = np.frombuffer(values, np.uint8).reshape(shape, order="F" if fortran else "C")
    return _checked(pixels, labels, where)


def _check_name(texts: list[str], where: str) -> None:
    """Raise DataError where a batch says in its `texts` that it is another than its file's name."""
    file = where.rpartition(" ")[2]
    name = texts[texts.index("batch_label") + 1] if "batch_label" in texts[:-1] else None
    wanted = BATCH_LABELS[PYTHON_NAMES.index(file)] if file in PYTHON_NAMES else name
    if name not in (None, wanted):
        told = f"{one_line(name)!r}, not {wanted!r}"
        raise _fault(f"{where} calls itself {told}: batch files were exchanged")


def _checked(pixels: np.ndarray, labels: list, where: str) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [M, 32, 32, 3] from [M, PIXELS], and int64 [M]."""
    if len(labels) != len(pixels):
        raise _fault(f"{where} has {len(pixels)} images but {len(labels)} labels")
    if any(type(label) is not int or not 0 <= label < NUM_CLASSES for label in labels):
        raise _fault(f"{where} has a label outside 0 to {NUM_CLASSES - 1}")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.int64)
