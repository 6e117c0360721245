"""Own images: from arrays or an .npz file to the bytes, labels and normalisation that hosts are
trained with.

Given two or three parts (train, test, val) and what the user chose of them, everything is checked,
put into 32x32 pixels of three channels, and told in notes: nothing is changed silently. Called by
datasets.py and user_images.py. Needs no torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from esper_soa.errors import DataError, SettingError, one_line
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, check_statistics
from esper_soa.nets.fit import Fit, fitted, plan_fit
from esper_soa.nets.npz import Npz, open_npz
from esper_soa.paths import user_path

PARTS = ("train", "test", "val")
CLASS_NAMES = "class_names"  # key of an .npz
MAX_CLASSES = 100_000  # as task.num_classes
MAX_IMAGES = 1 << 24  # of a part
MAX_SIDE = 1024  # pixels
MAX_NAME_BYTES = 64 << 20
AT_ONCE = 32 << 20  # bytes of images in work at a time
CHANNELS = ("red", "green", "blue")
COUNTED = 4096  # images whose bytes are counted at a time, to bound memory
MOST_TOLD = 20  # classes by name
KEYS = "train_images, train_labels, test_images, test_labels"

Statistics = tuple[float, float, float]


class Preparation(NamedTuple):
    """What the user chose; see DataConfig."""

    layout: str = "nhwc"
    resize: str = "auto"
    val: str = "unused"
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    class_names: Sequence[str] = ()
    path: str = ""  # before the name of a setting in messages: "data." in a run


class Part(NamedTuple):
    """An array that may be larger than memory."""

    name: str  # what messages call it
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int], Iterator[np.ndarray]]  # parts of whole rows of at most so many bytes

    def whole(self) -> np.ndarray:
        """All of it."""
        return np.concatenate([*self.rows(AT_ONCE), np.empty((0, *self.shape[1:]), self.dtype)])


class Frame(NamedTuple):
    """What the images of a part are."""

    number: int
    height: int  # pixels
    width: int
    channels: int


class OwnImages(NamedTuple):
    """Images as hosts see them: D for training and V for testing, of C classes."""

    train_images: np.ndarray  # uint8 [D, 32, 32, 3]
    train_labels: np.ndarray  # int64 [D], 0 to C - 1
    test_images: np.ndarray  # uint8 [V, 32, 32, 3]
    test_labels: np.ndarray  # int64 [V]
    mean: Statistics  # per channel, of values in [0, 1]
    std: Statistics
    num_classes: int  # C
    class_names: tuple[str, ...]  # of all classes, or none
    notes: tuple[str, ...]  # what was done, a clause each


class OwnFile(NamedTuple):
    """The content of an .npz file."""

    images: OwnImages
    name: str  # of the set: that of the file, without its end
    sha256: str  # of the file, hexadecimal


def read_npz(setting: str, root: str, chosen: Preparation) -> OwnFile:
    """The images of the .npz file `root`; `setting` is what messages call it.

    Keys: train_images, train_labels, test_images, test_labels, as in MedMNIST's files; val_images,
    val_labels and class_names may be there. Raises SettingError or DataError for what cannot be
    used.
    """
    path = user_path(setting, root)
    with open_npz(path, f"{setting}={one_line(root)}") as file:
        parts = _parts(file)
        if not chosen.class_names and CLASS_NAMES in file.names:
            chosen = chosen._replace(class_names=_file_names(file))
        images = prepare(parts, chosen)
        return OwnFile(images, one_line(path.stem), file.sha256())


def count_npz(setting: str, root: str, val: str) -> tuple[int, int]:
    """How many training and test images the .npz file `root` has by its headers, with `val` as
    data.val has it.
    """
    with open_npz(user_path(setting, root), f"{setting}={one_line(root)}") as file:
        parts = _parts(file)
        sizes = {
            name: parts[f"{name}_images"].shape[:1] for name in PARTS if f"{name}_images" in parts
        }
        train, test = parts_used(sizes, val)
        return sum(sum(sizes[name]) for name in train), sum(sizes[test])


def _parts(file: Npz) -> dict[str, Part]:
    """Images and labels of all parts by key; raises DataError where keys are missing."""
    keys = [f"{name}_{kind}" for name in PARTS for kind in ("images", "labels")]
    missing = [key for key in keys[:2] if key not in file.names]
    if not any(key in file.names for key in keys[2:]):
        missing += keys[2:4]
    if missing:
        found = ", ".join(map(one_line, file.names[:8])) or "no arrays"
        raise DataError(
            f"{file.where}: lacks {', '.join(missing)}: must have {KEYS}. It holds {found}."
        )
    return {key: _member(file, key) for key in keys if key in file.names}


def _member(file: Npz, key: str) -> Part:
    header = file.header(key)

    def rows(most_bytes: int) -> Iterator[np.ndarray]:
        return file.rows(key, most_bytes)

    return Part(f"{file.where}: {key}", header.shape, header.dtype, rows)


def _file_names(file: Npz) -> tuple[str, ...]:
    found = file.whole(CLASS_NAMES, MAX_NAME_BYTES)
    if found.ndim != 1 or found.dtype.kind != "U":
        raise DataError(
            f"{file.where}: {CLASS_NAMES} has shape {list(found.shape)} and type {found.dtype}: "
            "must be a "
            "list of texts. Save numpy.array(['cat', 'dog'])."
        )
    return tuple(str(name) for name in found)


def array_part(name: str, array: np.ndarray) -> Part:
    """An array in memory."""

    def rows(most_bytes: int) -> Iterator[np.ndarray]:
        at_once = max(1, most_bytes // max(1, array[:1].nbytes))
        for first in range(0, len(array), at_once):
            yield array[first : first + at_once]

    return Part(name, array.shape, array.dtype, rows)


def prepare(parts: Mapping[str, Part], chosen: Preparation) -> OwnImages:
    """Images of train_images, train_labels and so on in `parts`, checked and as hosts see them."""
    check_statistics(chosen.path, chosen.mean, chosen.std)
    labels = {}
    frames = {}
    for name in PARTS:
        if f"{name}_images" in parts or f"{name}_labels" in parts:
            images = _paired(parts, f"{name}_images", f"{name}_labels")
            frames[name] = frame_of(images, chosen)
            labels[name] = _labels(
                _paired(parts, f"{name}_labels", f"{name}_images"), frames[name].number, images.name
            )
    num_classes = _num_classes(labels, parts, chosen.class_names)
    train, test = parts_used(frames, chosen.val, chosen.path)
    first = frames["train"]
    for name in (*train, test):
        if frames[name][1:] != first[1:]:
            raise DataError(
                f"{parts[f'{name}_images'].name}: {_size(frames[name])}, but the training images "
                "have "
                f"{_size(first)}: must be the same. Prepare all parts in one way."
            )
    fit = plan_fit(first.height, first.width, chosen.resize, f"{chosen.path}resize")
    used = {name: parts[f"{name}_images"] for name in (*train, test)}
    shown = {
        name: shown_images(part, chosen.layout, frames[name], fit) for name, part in used.items()
    }
    train_images = _joined([shown[name] for name in train])
    (mean, std), told = normalisation(train_images, chosen, parts["train_images"].name)
    return OwnImages(
        train_images,
        _joined([labels[name] for name in train]),
        shown[test],
        labels[test],
        mean,
        std,
        num_classes,
        tuple(chosen.class_names),
        (
            fit.words,
            *_pixel_notes(first, list(used.values())),
            *_val_notes(frames, chosen),
            told,
            _class_words(num_classes, chosen.class_names),
        ),
    )


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """All of them in one; a single one is not copied, as there may be room for one only."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def parts_used(
    found: Mapping[str, object], val: str, path: str = "data."
) -> tuple[tuple[str, ...], str]:
    """The parts that are trained on, and the one that is tested on; raises SettingError where `val`
    needs a part.
    """
    setting = f"{path}val"
    if val != "unused" and "val" not in found:
        raise SettingError(setting, val, "unused where there are no val_images", "Leave it out.")
    if val != "for_test" and "test" not in found:
        raise SettingError(
            setting,
            val,
            "for_test where there are no test_images",
            "The part val_ is then tested on.",
        )
    return ("train", "val") if val == "train" else (
        "train",
    ), "val" if val == "for_test" else "test"


def _paired(parts: Mapping[str, Part], key: str, other: str) -> Part:
    if key not in parts:
        raise DataError(f"{parts[other].name} is there, but not {key}: must have both. Add {key}.")
    return parts[key]


def frame_of(part: Part, chosen: Preparation) -> Frame:
    """Number, size and channels of the images in `part`; raises DataError for what are no
    images.
    """
    shape = part.shape
    layout = f"{chosen.path}layout={chosen.layout}"
    order = (
        "[images, height, width, 1 or 3]"
        if chosen.layout == "nhwc"
        else "[images, 1 or 3, height, width]"
    )
    if len(shape) not in (3, 4):
        raise DataError(
            f"{part.name} has shape {list(shape)}: must be {order}, or [images, height, width], "
            f"with {layout}."
        )
    channels = 1
    if len(shape) == 4:
        channels = shape[3] if chosen.layout == "nhwc" else shape[1]
    height, width = shape[-2:] if chosen.layout == "nchw" else shape[1:3]
    if channels not in (1, IMAGE_CHANNELS):
        raise DataError(
            f"{part.name} has shape {list(shape)}, which is {channels} channels with {layout}: "
            "must be "
            f"{order}, or [images, height, width]. {_channel_remedy(shape, chosen)}"
        )
    if not 1 <= shape[0] <= MAX_IMAGES:
        raise DataError(f"{part.name} has {shape[0]} images: must have 1 to {MAX_IMAGES}.")
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise DataError(
            f"{part.name} has images of {height}x{width} pixels: must have 1 to {MAX_SIDE} a side. "
            f"Hosts see {IMAGE_SIZE}x{IMAGE_SIZE}: give smaller ones."
        )
    if part.dtype != np.uint8 and part.dtype.kind != "f":
        raise DataError(
            f"{part.name} has type {part.dtype}: must be uint8, from 0 to 255, or float, from 0 "
            "to 1. "
            "Convert whole numbers from 0 to 255 with .astype(numpy.uint8)."
        )
    return Frame(shape[0], height, width, channels)


def _channel_remedy(shape: tuple[int, ...], chosen: Preparation) -> str:
    other = "nchw" if chosen.layout == "nhwc" else "nhwc"
    if shape[1 if other == "nchw" else 3] in (1, IMAGE_CHANNELS):
        return (
            f"Give {chosen.path}layout={other} if channels are the "
            f"{'second' if other == 'nchw' else 'last'} index."
        )
    if shape[1] == shape[2] == shape[3]:
        return "Volumes, as in MedMNIST's 3D sets, cannot be used."
    return "Leave transparency and further channels out."


def _labels(part: Part, count: int, images: str) -> np.ndarray:
    """int64 [M] from whole numbers [M] or [M, 1]."""
    if len(part.shape) == 2 and part.shape[1] != 1:
        raise DataError(
            f"{part.name} has shape {list(part.shape)}, {part.shape[1]} labels per image: must be "
            "[images] "
            "or [images, 1]. Sets with several labels per image, as ChestMNIST, cannot be used; "
            "of one-hot "
            "labels take .argmax(1)."
        )
    if len(part.shape) not in (1, 2):
        raise DataError(
            f"{part.name} has shape {list(part.shape)}: must be [images] or [images, 1]."
        )
    if part.shape[0] != count:
        raise DataError(
            f"{part.name} has {part.shape[0]} labels, but {images} has {count} images: must "
            "be as "
            "many."
        )
    if part.dtype.kind not in "iu":
        raise DataError(
            f"{part.name} has type {part.dtype}: must be whole numbers, the classes from 0 on. "
            "Convert with .astype(numpy.int64)."
        )
    values = part.whole().reshape(-1)
    low = int(values.min())
    high = int(values.max())
    if low < 0 or high >= MAX_CLASSES:
        bad = low if low < 0 else high
        raise DataError(
            f"{part.name} holds {bad} at {int((values == bad).argmax())}: must be classes from 0 "
            "to "
            f"{MAX_CLASSES - 1} at most. Number the classes from 0 on."
        )
    return values.astype(np.int64)


def _num_classes(
    labels: Mapping[str, np.ndarray], parts: Mapping[str, Part], names: Sequence[str]
) -> int:
    """As many as have names, else as the labels of all parts tell, those included that are not
    used.
    """
    last, where = max(
        (int(values.max()), parts[f"{name}_labels"].name) for name, values in labels.items()
    )
    if not names:
        if last == 0:
            raise DataError(f"{where}: all labels are 0: must be of at least 2 classes.")
        return last + 1
    told = [one_line(name) for name in names if not isinstance(name, str) or not name.strip()]
    if told or len(set(names)) != len(names) or not 2 <= len(names) <= MAX_CLASSES:
        raise SettingError(
            CLASS_NAMES,
            ", ".join(map(str, names)),
            f"2 to {MAX_CLASSES} different texts, none empty",
        )
    if last >= len(names):
        raise DataError(
            f"{where} holds {last}: must be at most {len(names) - 1}, as {CLASS_NAMES} has "
            f"{len(names)}. "
            "Name every class, or none."
        )
    return len(names)


def shown_images(part: Part, layout: str, frame: Frame, fit: Fit) -> np.ndarray:
    """uint8 [M, 32, 32, 3] of the images in `part`; raises DataError for values that are no
    brightness.
    """
    shown = np.empty((frame.number, IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS), np.uint8)
    first = 0
    for rows in part.rows(AT_ONCE):
        pixels = rows if rows.dtype == np.uint8 else _bytes(rows, part.name, first)
        if pixels.ndim == 4 and layout == "nchw":
            pixels = np.moveaxis(pixels, 1, 3)
        pixels = pixels.reshape(len(pixels), frame.height, frame.width, frame.channels)
        shown[first : first + len(pixels)] = fitted(pixels, fit)  # one channel goes to all three
        first += len(pixels)
    return shown


def _bytes(values: np.ndarray, name: str, first: int) -> np.ndarray:
    """Bytes from brightness in [0, 1], to the nearest of 256 levels; image 0 of `values` is number
    `first`.
    """
    bad = ~((values >= 0) & (values <= 1))  # NaN is neither
    if bad.any():
        at = np.argwhere(bad)[0]
        raise DataError(
            f"{name} holds {values[tuple(at)]} in image {first + int(at[0])}: must be from 0 to 1. "
            "Divide by 255, or give uint8, and replace what is not a number."
        )
    return np.rint(values.astype(np.float64) * 255).astype(np.uint8)


def normalisation(
    images: np.ndarray, chosen: Preparation, name: str
) -> tuple[tuple[Statistics, Statistics], str]:
    """Mean and deviation per channel as chosen, else of the training images, by counts of bytes;
    and words for them.
    """
    if chosen.mean:
        mean = _three(chosen.mean)
        std = _three(chosen.std)
        return (
            (mean, std),
            (
                f"normalised by mean {_shown(mean)} and deviation {_shown(std)}, as "
                f"{chosen.path}mean "
                "says"
            ),
        )
    levels = np.arange(256)
    means = []
    stds = []
    still = []
    for channel, counts in enumerate(level_counts(images)):
        total, first, second = (int(counts @ levels**power) for power in range(3))
        spread = total * second - first**2  # whole numbers: the same on every machine
        means.append(first / total / 255)
        stds.append(math.sqrt(spread) / total / 255 if spread else 1.0)
        still += [] if spread else [CHANNELS[channel]]
    if len(still) == IMAGE_CHANNELS:
        raise DataError(f"{name}: every pixel of the training images is the same: must be images.")
    words = (
        f"normalised by mean {_shown(means)} and deviation {_shown(stds)} of the training images"
    )
    return (_three(means), _three(stds)), words + (
        f"; {' and '.join(still)} never varies" if still else ""
    )


def level_counts(images: np.ndarray) -> np.ndarray:
    """How often every byte occurs in each channel: int64 [3, 256] of uint8 [M, 32, 32, 3]."""
    counts = np.zeros((IMAGE_CHANNELS, 256), np.int64)
    for first in range(0, len(images), COUNTED):
        part = images[first : first + COUNTED]
        for channel in range(IMAGE_CHANNELS):
            counts[channel] += np.bincount(part[..., channel].reshape(-1), minlength=256)
    return counts


def _three(values: Sequence[float]) -> Statistics:
    red, green, blue = (
        float(value) for value in (values if len(values) > 1 else [*values] * IMAGE_CHANNELS)
    )
    return red, green, blue


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _class_words(count: int, names: Sequence[str]) -> str:
    told = ", ".join(f"{number} {one_line(name)}" for number, name in enumerate(names[:MOST_TOLD]))
    more = ", ..." if len(names) > MOST_TOLD else ""
    return f"{count} classes" + (f": {told}{more}" if names else "")


def _size(frame: Frame) -> str:
    return (
        f"{frame.height}x{frame.width} pixels with {frame.channels} "
        f"channel{'s' if frame.channels > 1 else ''}"
    )


def _pixel_notes(frame: Frame, used: Sequence[Part]) -> list[str]:
    grey = ["grey: the one channel is repeated, as hosts have three"] if frame.channels == 1 else []
    floats = dict.fromkeys(part.dtype.name for part in used if part.dtype.kind == "f")
    return grey + ([f"{' and '.join(floats)} from 0 to 1, rounded to 256 levels"] if floats else [])


def _val_notes(frames: Mapping[str, Frame], chosen: Preparation) -> list[str]:
    if "val" not in frames:
        return []
    count = frames["val"].number
    setting = f"{chosen.path}val={chosen.val}"
    if chosen.val == "train":
        return [f"the {count} images of the part val_ are training images too ({setting})"]
    if chosen.val == "for_test":
        test = (
            f", and the {frames['test'].number} of test_ are left out" if "test" in frames else ""
        )
        return [f"the {count} images of the part val_ are the test images{test} ({setting})"]
    return [
        f"the {count} images of the part val_ are not used ({setting}; train or for_test would)"
    ]
