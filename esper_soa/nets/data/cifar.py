"""Reads CIFAR-10 from the official files of its python version: a folder or the .tar.gz.

The files are not trusted: pickles are parsed for texts and numbers without executing them, archives
are read in memory with bounded sizes, and every size and label is checked.
"""

import gzip
import io
import pickletools
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from esper_soa.config.paths import user_path
from esper_soa.nets.data.image_set import MAX_COMMON, hashes
from esper_soa.system.errors import DataError, one_line

# Batches in their order, and what they call themselves.
BATCH_TITLES = {f"data_batch_{number}": f"training batch {number} of 5" for number in range(1, 6)}
BATCH_TITLES["test_batch"] = "testing batch 1 of 1"
CIFAR_PLACES = ("cifar-10-batches-py", "cifar-10-python.tar.gz")

BYTE_OPCODE = "BININT1"  # instruction of a pickle for 0 to 255
NUM_CLASSES = 10
IMAGE_PIXELS = 3 * 32 * 32  # of one image: 1024 red, then green, then blue, row by row
MAX_FILE_BYTES = 64 << 20  # an official batch has 31 MB
MAX_ARCHIVE_BYTES = 512 << 20  # unpacked; the official archives have about 180 MB
_BROKEN_ARCHIVE = (tarfile.TarError, gzip.BadGzipFile, EOFError, ValueError, zlib.error)

Batch = tuple[np.ndarray, np.ndarray]  # images uint8 [M, 32, 32, 3], labels int64 [M] from 0 to 9


def read_cifar10(root: str) -> tuple[Batch, Batch, Path]:
    """Images of the five training batches, in order, and of the test batch, and where all lie.

    root: the folder of the batches, a folder that holds one of CIFAR_PLACES, or an archive. Batches
    may have any size. DataError where something is missing, broken, exchanged or not trusted.
    """
    path = user_path("data.root", root)
    try:
        place = _locate(path)
        files = _read_archive(place) if place.is_file() else _read_folder(place)
    except _BROKEN_ARCHIVE as error:
        problem = f"not a whole .tar.gz archive ({one_line(error)})"
        hint = "For a file of your own give data.name=npz or text"
        raise _fault(f"{path}: {problem}. {hint}") from error
    except OSError as error:
        problem = f"cannot be read ({one_line(error)}). Check permissions."
        raise DataError(f"data.root={one_line(path)}: {problem}") from error
    missing = [name for name in BATCH_TITLES if name not in files]
    if missing:
        raise _fault(f"{place}: CIFAR-10 is incomplete, without {', '.join(missing)}")
    *batches, test = (parse_pickle(files.pop(name), f"{place}: {name}") for name in BATCH_TITLES)
    images = np.concatenate([images for images, _ in batches])
    trained = set(hashes(images))
    if len(images) - len(trained) > MAX_COMMON * len(images):
        raise _fault(f"{place}: training batches hold the same images")
    common = sum(code in trained for code in hashes(test[0]))
    if common > MAX_COMMON * len(test[0]):
        raise _fault(f"{place}: {common} images of test_batch are training images too")
    return (images, np.concatenate([labels for _, labels in batches])), test, place


def _fault(text: str) -> DataError:
    remedy = "Fetch CIFAR-10 again from its official page, or set data.name=fashion32"
    return DataError(f"{text}. {remedy} without data.root.")


def _locate(root: Path) -> Path:
    for place in (root, *(root / name for name in CIFAR_PLACES)):
        if place.is_file() or any((place / name).exists() for name in BATCH_TITLES):
            return place
    if not root.is_dir():
        remedy = "Name the place of CIFAR-10, or leave data.root empty."
        raise DataError(f"data.root={one_line(root)}: no such folder or archive. {remedy}")
    problem = f"holds no CIFAR-10: neither its batch files nor one of {', '.join(CIFAR_PLACES)}"
    raise _fault(f"data.root={one_line(root)}: {problem}. Class folders are data.name=folder")


def _read_folder(folder: Path) -> dict[str, bytes]:
    files = {}
    for path in (folder / name for name in BATCH_TITLES):
        if path.is_file():
            with path.open("rb") as stream:
                files[path.name] = _content(stream, str(path))
        elif path.exists():
            _content(None, str(path))
    return files


def _read_archive(path: Path) -> dict[str, bytes]:
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_gzip else path.open("rb") as stream:
        content = stream.read(MAX_ARCHIVE_BYTES + 1)
    if len(content) > MAX_ARCHIVE_BYTES:
        raise _fault(f"{path}: unpacks to more than {MAX_ARCHIVE_BYTES >> 20} MiB")
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in files:
                raise _fault(f"{path}: holds {name} twice")
            if name in BATCH_TITLES:  # a link would be followed
                opened = archive.extractfile(member) if member.isreg() else None
                files[name] = _content(opened, f"{path}: {name}")
    return files


def _content(stream: IO[bytes] | None, where: str) -> bytes:
    content = stream.read(MAX_FILE_BYTES + 1) if stream else b""
    if stream is None or len(content) > MAX_FILE_BYTES:
        raise _fault(f"{where} is not a plain file of at most {MAX_FILE_BYTES >> 20} MiB")
    return content


def parse_pickle(content: bytes, where: str) -> Batch:
    """The images of a pickled dict: `data` [M, PIXELS] and `labels`. where: ends in a file's name.

    The instructions of the pickle are not carried out. Labels are the numbers behind the text
    `labels`; data are the longest text, in the memory of an array of unsigned bytes.
    """
    known_texts = [("", False)]  # the texts, and what was said before of Fortran's order
    labels = []
    order = False
    try:
        for opcode, argument, _ in pickletools.genops(content):
            text = argument.decode("latin1") if isinstance(argument, bytes) else argument
            if isinstance(text, str) and text != "latin1":  # as bytes are pickled: text, encoding
                known_texts.append((text, order))
            elif opcode.name in ("NEWTRUE", "NEWFALSE"):
                order = opcode.name == "NEWTRUE"
            elif known_texts[-1][0] == "labels" and opcode.name == BYTE_OPCODE:
                labels.append(argument)
        texts = [text for text, _ in known_texts]
        if "labels" not in texts or "data" not in texts:
            raise ValueError("lacks `data` or `labels`; CIFAR-100 cannot be used")
        data, fortran = max(known_texts, key=lambda known: len(known[0]))
        values = data.encode("latin1")
        if "u1" not in texts or len(values) % IMAGE_PIXELS:
            raise ValueError(
                f"`data` does not hold unsigned bytes of shape [images, {IMAGE_PIXELS}]"
            )
    except ValueError as error:
        problem = f"{where} is broken or truncated, or no CIFAR-10 batch ({one_line(error)})"
        raise _fault(problem) from error
    called = texts[texts.index("batch_label") + 1] if "batch_label" in texts[:-1] else None
    batch_name = BATCH_TITLES.get(where.rpartition(" ")[2], called)
    if called not in (None, batch_name):
        problem = f"{one_line(called)!r}, not {batch_name!r}"
        raise _fault(f"{where} calls itself {problem}: batch files were exchanged")
    shape = len(values) // IMAGE_PIXELS, IMAGE_PIXELS
    pixels = np.frombuffer(values, np.uint8).reshape(shape, order="F" if fortran else "C")
    return _check_samples(pixels, labels, where)


def _check_samples(pixels: np.ndarray, labels: list, where: str) -> Batch:
    if len(labels) != len(pixels):
        raise _fault(f"{where} has {len(pixels)} images but {len(labels)} labels")
    if any(label >= NUM_CLASSES for label in labels):
        raise _fault(f"{where} has a label outside 0 to {NUM_CLASSES - 1}")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, np.int64)
