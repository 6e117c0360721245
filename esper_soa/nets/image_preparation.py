"""Own images: from arrays or an .npz to the bytes, labels and normalisation that hosts train on.

Given two or three parts (train, test, val) and what the user chose of them, everything is checked,
put into 32x32 pixels of three channels, and told in notes: nothing is changed silently.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.errors import DataError, SettingError, check, one_line
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, check_statistics
from esper_soa.nets.fit import fit_words, fitted, inner_size
from esper_soa.nets.npz import AT_ONCE, Part, npz_parts
from esper_soa.paths import user_path

PARTS = ("train", "test", "val")
KEYS = tuple(f"{name}_{kind}" for name in PARTS for kind in ("images", "labels"))
CLASS_NAMES = "class_names"  # key of an .npz
MAX_CLASSES = 100_000  # as task.num_classes
MAX_IMAGES = 1 << 24  # of a part
MAX_SIDE = 1024  # pixels
CHANNELS = ("red", "green", "blue")
MOST_TOLD = 20  # classes by name
HANDED_OVER = "own images from arrays, handed over"

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


class ImageSet(NamedTuple):
    """D training and V test images of C classes on one device."""

    name: str
    train_images: Tensor  # uint8 [D, 32, 32, 3]
    train_labels: Tensor  # int64 [D], 0 to C - 1
    test_images: Tensor  # uint8 [V, 32, 32, 3]
    test_labels: Tensor  # int64 [V], 0 to C - 1
    mean: Statistics  # per channel, of values in [0, 1]
    std: Statistics
    # Sha256 of images and labels, of own ones also of what else hosts see of them, hexadecimal.
    identity: str
    source: str  # a sentence: where they come from and how many there are
    # C of own images, which task.num_classes must be; None: any that holds the labels.
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()  # of own images, where they have names
    notes: tuple[str, ...] = ()  # what was done to own images, a clause each
    file_sha256: str = ""  # of the file of own images, hexadecimal

    def to(self, device: torch.device | str) -> "ImageSet":
        """The same on `device`; itself where it is there."""
        if self.train_images.device == torch.device(device):
            return self
        return self._replace(
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )

    def facts(self) -> dict[str, str]:
        """What versions.json keeps of the set."""
        own = {
            "classes": str(self.num_classes),
            "class_names": json.dumps(self.class_names),
            "file_sha256": self.file_sha256,
            "preparation": "; ".join(self.notes),
        }
        record = {"name": self.name, "source": self.source, "identity": self.identity}
        record["mean"] = ", ".join(map(repr, self.mean))
        record["std"] = ", ".join(map(repr, self.std))
        return record if self.num_classes is None else record | own

    def __repr__(self) -> str:
        """In words: tensors of images are no use on a screen."""
        return "\n  ".join([f"{self.name}: {self.source}", *self.notes])


def image_set(
    name: str,
    arrays: Sequence[np.ndarray],
    statistics: tuple[Statistics, Statistics],
    text: str,
    device: torch.device | str,
    further: bytes = b"",
) -> ImageSet:
    """The four arrays on the device; their identity is of them and `further`."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    digest.update(further)
    source = f"{text}: {len(arrays[0])} training and {len(arrays[2])} test images."
    train, labels, test, test_labels = (torch.from_numpy(array).to(device) for array in arrays)
    identity = digest.hexdigest()
    return ImageSet(name, train, labels, test, test_labels, *statistics, identity, source)


def read_npz(setting: str, root: str, chosen: Preparation, reason: str) -> ImageSet:
    """The images of the .npz file `root`, which `setting` names, taken for the `reason`.

    Keys: train_images, train_labels, test_images, test_labels, as in MedMNIST's files; val_images,
    val_labels, class_names may be there. SettingError or DataError for what cannot be used.
    """
    parts = _parts(setting, root)
    names = parts.pop(CLASS_NAMES, None)
    if names is not None and not chosen.class_names:
        if len(names.shape) != 1 or names.dtype.kind != "U":
            found = f"shape {list(names.shape)} and type {names.dtype}"
            remedy = "must be a list of texts. Save numpy.array(['cat', 'dog'])."
            raise DataError(f"{names.name} has {found}: {remedy}")
        chosen = chosen._replace(class_names=tuple(names.whole().tolist()))
    images = prepare(parts, chosen)
    with user_path(setting, root).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    counts = images.source.rpartition(": ")[2]
    source = f"own images from {one_line(root)} (sha256 {sha256[:12]}..., {reason}): {counts}"
    name = one_line(Path(root).stem)
    return images._replace(name=name, source=source, file_sha256=sha256)


def count_npz(setting: str, root: str, val: str) -> tuple[int, int]:
    """How many training and test images .npz file `root` has by its headers; `val`: data.val."""
    parts = _parts(setting, root)
    sizes = {key[:-7]: sum(part.shape[:1]) for key, part in parts.items() if key in KEYS[::2]}
    train, test = parts_used(sizes, val)
    return sum(sizes[name] for name in train), sizes[test]


def _parts(setting: str, root: str) -> dict[str, Part]:
    """Images and labels of all parts and names of classes by key."""
    where = f"{setting}={one_line(root)}"
    parts, names = npz_parts(user_path(setting, root), where, (*KEYS, CLASS_NAMES))
    missing = [key for key in KEYS[:2] if key not in parts]
    if not any(key in parts for key in KEYS[2:]):
        missing += KEYS[2:4]
    if missing:
        held = ", ".join(map(one_line, names[:8])) or "no arrays"
        wanted = ", ".join(KEYS[:4])
        told = f"lacks {', '.join(missing)}: must have {wanted}. It holds {held}."
        raise DataError(f"{where}: {told}")
    return parts


def prepare(parts: Mapping[str, Part], chosen: Preparation) -> ImageSet:
    """Images of train_images, train_labels and so on in `parts`, checked and as hosts see them.

    Mean, deviation and the number of classes are part of what they are.
    """
    check_statistics(chosen.path, chosen.mean, chosen.std)
    for name in PARTS:
        both = [f"{name}_images", f"{name}_labels"]
        there = [key for key in both if key in parts]
        if len(there) == 1:
            told = f"{parts[there[0]].name} is there alone"
            raise DataError(f"{told}: must have both {' and '.join(both)}.")
    images = {name: parts[f"{name}_images"] for name in PARTS if f"{name}_images" in parts}
    sizes = {name: _check_images(part, chosen) for name, part in images.items()}
    labels = {name: _labels(parts[f"{name}_labels"], images[name]) for name in images}
    num_classes = _num_classes(labels, parts, chosen.class_names)
    train, test = parts_used(images, chosen.val, chosen.path)
    used = {name: images[name] for name in (*train, test)}
    first = sizes["train"]
    for name in used:
        if sizes[name] != first:
            told = f"{_size(*sizes[name])}, but the training images have {_size(*first)}"
            remedy = "must be the same. Prepare all parts in one way."
            raise DataError(f"{images[name].name}: {told}: {remedy}")
    setting = f"{chosen.path}resize"
    inner = inner_size(*first[:2], chosen.resize, setting)
    shown = {name: _shown(part, chosen.layout, first, inner) for name, part in used.items()}
    train_images = _joined([shown[name] for name in train])
    mean, std, told = _normalisation(train_images, chosen, images["train"].name)
    notes = (
        fit_words(first[:2], inner, f"{setting}={chosen.resize}"),
        *_pixel_notes(first[2], used),
        *_val_notes(images, chosen),
        told,
        _class_words(num_classes, chosen.class_names),
    )
    arrays = train_images, _joined([labels[name] for name in train]), shown[test], labels[test]
    further = repr(((mean, std), num_classes)).encode()
    made = image_set("images", arrays, (mean, std), HANDED_OVER, "cpu", further)
    names = tuple(chosen.class_names)
    return made._replace(num_classes=num_classes, class_names=names, notes=notes)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """All of them in one; a single one is not copied, as there may be room for one only."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def parts_used(
    found: Mapping[str, object], val: str, path: str = "data."
) -> tuple[tuple[str, ...], str]:
    """The parts trained on, and the one tested on; raises SettingError where `val` needs a part."""
    setting = f"{path}val"
    allowed = "unused where there are no val_images"
    check(val == "unused" or "val" in found, setting, val, allowed, "Leave it out.")
    allowed = "for_test where there are no test_images"
    remedy = "The part val_ is then tested on."
    check(val == "for_test" or "test" in found, setting, val, allowed, remedy)
    trained = ("train", "val") if val == "train" else ("train",)
    return trained, "val" if val == "for_test" else "test"


def _check_images(part: Part, chosen: Preparation) -> tuple[int, int, int]:
    """Height, width and channels of the images; raises DataError for what are no images."""
    shape = part.shape
    layout = f"{chosen.path}layout={chosen.layout}"
    last = chosen.layout == "nhwc"
    order = f"[images, {'height, width, 1 or 3' if last else '1 or 3, height, width'}]"
    told = f"{part.name} has shape {list(shape)}"
    if len(shape) not in (3, 4):
        raise DataError(f"{told}: must be {order}, or [images, height, width], with {layout}.")
    full = shape if len(shape) == 4 else (*shape, 1) if last else (shape[0], 1, *shape[1:])
    height, width, channels = full[1:] if last else (*full[2:], full[1])
    if channels not in (1, IMAGE_CHANNELS):
        told += f", which is {channels} channels with {layout}"
        remedy = _channel_remedy(shape, chosen)
        raise DataError(f"{told}: must be {order}, or [images, height, width]. {remedy}")
    if not 1 <= shape[0] <= MAX_IMAGES:
        raise DataError(f"{part.name} has {shape[0]} images: must have 1 to {MAX_IMAGES}.")
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        told = f"{part.name} has images of {height}x{width} pixels"
        remedy = f"Hosts see {IMAGE_SIZE}x{IMAGE_SIZE}: give smaller ones."
        raise DataError(f"{told}: must have 1 to {MAX_SIDE} a side. {remedy}")
    if part.dtype != np.uint8 and part.dtype.kind != "f":
        raise DataError(
            f"{part.name} has type {part.dtype}: must be uint8, from 0 to 255, or float, from 0 "
            "to 1. Convert whole numbers from 0 to 255 with .astype(numpy.uint8)."
        )
    return height, width, channels


def _channel_remedy(shape: tuple[int, ...], chosen: Preparation) -> str:
    other, place, at = ("nchw", "second", 1) if chosen.layout == "nhwc" else ("nhwc", "last", 3)
    if shape[at] in (1, IMAGE_CHANNELS):
        return f"Give {chosen.path}layout={other} if channels are the {place} index."
    if shape[1] == shape[2] == shape[3]:
        return "Volumes, as in MedMNIST's 3D sets, cannot be used."
    return "Leave transparency and further channels out."


def _labels(part: Part, images: Part) -> np.ndarray:
    """int64 [M] from whole numbers [M] or [M, 1]."""
    shape = part.shape
    told = f"{part.name} has shape {list(shape)}"
    if len(shape) == 2 and shape[1] != 1:
        raise DataError(
            f"{told}, {shape[1]} labels per image: must be [images] or [images, 1]. Sets with "
            "several labels per image, as ChestMNIST, cannot be used; of one-hot labels take "
            ".argmax(1)."
        )
    if len(shape) not in (1, 2):
        raise DataError(f"{told}: must be [images] or [images, 1].")
    if shape[0] != images.shape[0]:
        told = f"{part.name} has {shape[0]} labels, but {images.name} has {images.shape[0]} images"
        raise DataError(f"{told}: must be as many.")
    if part.dtype.kind not in "iu":
        remedy = "must be whole numbers, the classes from 0 on. Convert with .astype(numpy.int64)."
        raise DataError(f"{part.name} has type {part.dtype}: {remedy}")
    values = part.whole().reshape(-1)
    bad = (values < 0) | (values >= MAX_CLASSES)
    if bad.any():
        at = int(bad.argmax())
        remedy = f"must be classes from 0 to {MAX_CLASSES - 1} at most. Number them from 0 on."
        raise DataError(f"{part.name} holds {values[at]} at {at}: {remedy}")
    return values.astype(np.int64)


def _num_classes(
    labels: Mapping[str, np.ndarray], parts: Mapping[str, Part], names: Sequence[str]
) -> int:
    """As many as have names, else as the labels of all parts tell, used or not."""
    last, name = max((int(values.max()), name) for name, values in labels.items())
    where = parts[f"{name}_labels"].name
    if not names:
        if last == 0:
            raise DataError(f"{where}: all labels are 0: must be of at least 2 classes.")
        return last + 1
    texts = all(isinstance(one, str) and one.strip() for one in names)
    if not texts or len(set(names)) != len(names) or not 2 <= len(names) <= MAX_CLASSES:
        allowed = f"2 to {MAX_CLASSES} different texts, none empty"
        raise SettingError(CLASS_NAMES, ", ".join(map(str, names)), allowed)
    if last >= len(names):
        allowed = f"at most {len(names) - 1}, as {CLASS_NAMES} has {len(names)}"
        raise DataError(f"{where} holds {last}: must be {allowed}. Name every class, or none.")
    return len(names)


def _shown(
    part: Part, layout: str, size: tuple[int, int, int], inner: tuple[int, int]
) -> np.ndarray:
    """uint8 [M, 32, 32, 3] of the images in `part`; DataError for values that are no brightness."""
    shown = np.empty((part.shape[0], IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS), np.uint8)
    first = 0
    for rows in part.rows(AT_ONCE):
        if rows.dtype != np.uint8:
            rows = _bytes(rows, part.name, first)
        if rows.ndim == 4 and layout == "nchw":
            rows = np.moveaxis(rows, 1, 3)
        shown[first : first + len(rows)] = fitted(rows.reshape(-1, *size), inner)  # grey: to all
        first += len(rows)
    return shown


def _bytes(values: np.ndarray, name: str, first: int) -> np.ndarray:
    """Bytes from brightness in [0, 1], to the nearest level; `first`: number of the first image."""
    bad = ~((values >= 0) & (values <= 1))  # NaN is neither
    if bad.any():
        at = np.argwhere(bad)[0]
        raise DataError(
            f"{name} holds {values[tuple(at)]} in image {first + int(at[0])}: must be from 0 to 1. "
            "Divide by 255, or give uint8, and replace what is not a number."
        )
    return np.rint(values.astype(np.float64) * 255).astype(np.uint8)


def _normalisation(
    images: np.ndarray, chosen: Preparation, name: str
) -> tuple[Statistics, Statistics, str]:
    """Mean and deviation per channel as chosen, else of the training images; and words for them."""
    mean = list(chosen.mean)
    std = list(chosen.std)
    end = f", as {chosen.path}mean says"
    if not mean:
        levels = np.arange(256)
        for counts in level_counts(images):
            total, first, second = (int(counts @ levels**power) for power in range(3))
            spread = total * second - first**2  # whole numbers: the same on every machine
            mean.append(first / total / 255)
            std.append(math.sqrt(spread) / total / 255 if spread else 0.0)
        still = [name for name, value in zip(CHANNELS, std, strict=True) if not value]
        if len(still) == IMAGE_CHANNELS:
            raise DataError(f"{name}: every pixel of the training images is the same.")
        end = " of the training images"
        end += f"; {' and '.join(still)} never varies" if still else ""
        std = [value or 1.0 for value in std]
    means = _three(mean)
    stds = _three(std)
    shown = (", ".join(f"{value:.4f}" for value in values) for values in (means, stds))
    return means, stds, f"normalised by mean {' and deviation '.join(shown)}{end}"


def level_counts(images: np.ndarray) -> np.ndarray:
    """How often every byte occurs in each channel: int64 [3, 256] of uint8 [M, 32, 32, 3]."""
    channels = torch.from_numpy(images).unbind(3)
    return np.stack([channel.flatten().bincount(minlength=256).numpy() for channel in channels])


def _three(values: Sequence[float]) -> Statistics:
    red, green, blue = map(float, values if len(values) > 1 else [*values] * IMAGE_CHANNELS)
    return red, green, blue


def _class_words(count: int, names: Sequence[str]) -> str:
    told = ", ".join(f"{number} {one_line(name)}" for number, name in enumerate(names[:MOST_TOLD]))
    more = ", ..." if len(names) > MOST_TOLD else ""
    return f"{count} classes" + (f": {told}{more}" if names else "")


def _size(height: int, width: int, channels: int) -> str:
    return f"{height}x{width} pixels with {channels} channel{'s' if channels > 1 else ''}"


def _pixel_notes(channels: int, used: Mapping[str, Part]) -> list[str]:
    grey = ["grey: the one channel is repeated, as hosts have three"] if channels == 1 else []
    floats = dict.fromkeys(part.dtype.name for part in used.values() if part.dtype.kind == "f")
    return grey + ([f"{' and '.join(floats)} from 0 to 1, rounded to 256 levels"] if floats else [])


def _val_notes(images: Mapping[str, Part], chosen: Preparation) -> list[str]:
    if "val" not in images:
        return []
    setting = f"{chosen.path}val={chosen.val}"
    left = f", and the {images['test'].shape[0]} of test_ are left out" if "test" in images else ""
    told = {
        "train": f"are training images too ({setting})",
        "for_test": f"are the test images{left} ({setting})",
        "unused": f"are not used ({setting}; train or for_test would)",
    }
    return [f"the {images['val'].shape[0]} images of the part val_ {told[chosen.val]}"]
