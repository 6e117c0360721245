"""A user's images: from arrays or an .npz, checked, to bytes, labels and normalisation of hosts."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from esper_soa.config.nets import IMAGE_CHANNELS, DataConfig
from esper_soa.config.paths import user_path
from esper_soa.nets.data.image_set import ImageSet, Part, image_set, set_aside
from esper_soa.nets.data.images import Statistics
from esper_soa.nets.data.npz import CHUNK_BYTES, LazyArray, check_ratio, lazy_array, npz_arrays
from esper_soa.nets.model import pictures
from esper_soa.system.errors import DataError, check, check_data, one_line

PART_NAMES = ("train", "test", "val")
NPZ_KEYS = tuple(f"{name}_{kind}" for name in PART_NAMES for kind in ("images", "labels"))
CLASS_NAMES = "class_names"  # key of an .npz
MAX_CLASSES = 100_000  # as task.num_classes
MAX_IMAGES = 1 << 24  # of a part
SCALED_AT_ONCE = 1024  # images, which take 100 kB each while they are scaled
COLOUR_NAMES = ("red", "green", "blue")
MAX_LISTED = 20  # classes by name
ROUNDING_ERROR = 0.01  # by which numbers from 0 to 1 are passed where rounding or scaling did it
# Ways to make images of numbers of other types, by the kind of a numpy.dtype.
WHOLE_REMEDY = "Convert whole numbers from 0 to 255 with .astype(numpy.uint8), others with "
WHOLE_REMEDY += "/ the value of white, 65535 in 16 bits."
TYPE_REMEDIES = {
    "u": WHOLE_REMEDY,
    "i": WHOLE_REMEDY,
    "b": "Convert with .astype(numpy.float32).",
    "O": "Give all images one shape, and stack them with numpy.stack(...).",
}


def read_images(
    cfg: DataConfig, reason: str, names: Sequence[str] = (), setting: str = "data.root"
) -> ImageSet:
    """The images of the .npz file `cfg.root`, which `setting` names, taken for the `reason`.

    Its keys are train_images, train_labels, test_images and test_labels, as in MedMNIST's files,
    and, for the validation part, val_images and val_labels; class_names hold where `names` is
    empty. Raises SettingError or DataError for a file that cannot be used.
    """
    path = user_path(setting, cfg.root)
    where = f"{setting}={one_line(cfg.root)}"
    parts, others = _parts(path, where)
    stored = parts.pop(CLASS_NAMES, None)
    if stored is not None and not names:
        actual = f"{stored.name} has shape {list(stored.shape)} and type {stored.dtype}"
        is_text = len(stored.shape) == 1 and stored.dtype.kind == "U"
        remedy = "Save numpy.array(['cat', 'dog'])."
        check_data(is_text, actual, "be a list of texts", remedy=remedy)
        names = stored.whole().tolist()
    count = sum(sum(part.shape[:1]) for key, part in parts.items() if key in NPZ_KEYS[::2])
    packed = path.stat().st_size
    image_bytes = math.prod(cfg.image_shape)
    problem = f"{where}: {packed} bytes hold {count} images of {image_bytes} bytes"
    check_ratio(problem, packed, count * image_bytes)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    origin = f"own images from {one_line(cfg.root)} (sha256 {sha256[:12]}..., {reason})"
    images = prepare(parts, cfg, names, origin=origin)
    left_out = (f"without the arrays {', '.join(map(one_line, others[:MAX_LISTED]))}",)
    notes = images.notes + left_out * bool(others)
    name = one_line(Path(cfg.root).stem)
    return replace(images, name=name, notes=notes, file_sha256=sha256)


def count_images(cfg: DataConfig) -> tuple[int, int]:
    """Numbers of training and other images in the .npz file `cfg.root`, read from its headers."""
    parts, _ = _parts(user_path("data.root", cfg.root), f"data.root={one_line(cfg.root)}")
    train, *others = (sum(parts[key].shape[:1]) for key in NPZ_KEYS[::2] if key in parts)
    return train, sum(others)


def count_classes(cfg: DataConfig) -> int:
    """The number of classes of the .npz file `cfg.root`: of its class_names, or by its labels."""
    parts, _ = _parts(user_path("data.root", cfg.root), f"data.root={one_line(cfg.root)}")
    if CLASS_NAMES in parts:
        return math.prod(parts[CLASS_NAMES].shape)
    pairs = zip(NPZ_KEYS[::2], NPZ_KEYS[1::2], strict=True)
    there = [_labels(parts[key], parts[of]) for of, key in pairs if {of, key} <= parts.keys()]
    return 1 + max(int(labels.max()) for labels in there)


def _parts(path: Path, where: str) -> tuple[dict[str, LazyArray], list[str]]:
    """The arrays by key, and the names of others in the file."""
    parts, names = npz_arrays(path, where, (*NPZ_KEYS, CLASS_NAMES))
    missing = [key for key in NPZ_KEYS[:4] if key not in parts]
    remedy = f"It holds {', '.join(map(one_line, names[:8])) or 'no arrays'}."
    message = f"{where}: lacks {', '.join(missing)}"
    check_data(not missing, message, f"have {', '.join(NPZ_KEYS[:4])}", remedy=remedy)
    return parts, [name for name in names if name not in parts]


def prepare(
    parts: Mapping[str, LazyArray], cfg: DataConfig, names: Sequence[str], origin: str
) -> ImageSet:
    """The set of the images train_images, train_labels and so on of `parts`, as hosts see them.

    names: the names of the classes, or none. Mean, deviation and the number of classes belong to
    the identity of the set. Without val_images the validation part is set aside from the training
    part. Raises SettingError or DataError for images or labels that cannot be used.
    """
    for name in PART_NAMES:
        keys = [f"{name}_images", f"{name}_labels"]
        present = [parts[key].name for key in keys if key in parts]
        message = f"{', '.join(present)} is there alone"
        check_data(len(present) != 1, message, f"have both {' and '.join(keys)}")
    images = {name: parts[f"{name}_images"] for name in PART_NAMES if f"{name}_images" in parts}
    sizes = {name: _check_images(part, cfg) for name, part in images.items()}
    labels = {name: _labels(parts[f"{name}_labels"], images[name]) for name in images}
    num_classes = _num_classes(labels, parts, names)
    message = "0 where there are val_images, which are the validation part"
    cfg.require("val" not in images or not cfg.validation_images, "validation_images", message)
    first = sizes["train"]
    for name, part in images.items():
        problem = f"{_size(*sizes[name])}, but the training images have {_size(*first)}"
        remedy = "Prepare all parts in one way."
        check_data(sizes[name] == first, f"{part.name}: {problem}", "be the same", remedy=remedy)
    inner = inner_size(*first[:2], cfg)
    colors = {
        name: (_as_color(part, cfg, first, inner=inner), labels[name])
        for name, part in images.items()
    }
    train = colors.pop("train")  # so that none is kept twice
    train, val = (train, colors.pop("val")) if "val" in colors else set_aside(train, cfg)
    notes = (
        resize_text(*first[:2], cfg),
        *_notes(list(images.values()), channel_text(first[2], cfg.channels)),
    )
    return user_set(
        (train, val, colors["test"]),
        cfg,
        names or num_classes,
        notes=notes,
        origin=origin,
        where=images["train"].name,
    )


def user_set(
    parts: Sequence[Part],
    cfg: DataConfig,
    classes: Sequence[str] | int,
    notes: Sequence[str],
    origin: str,
    where: str,
) -> ImageSet:
    """The set of a training, a validation and a test part, normalised as `cfg` says.

    classes: their names, or how many there are; notes: what was done to the images; where: what
    messages call those of training.
    """
    names, count = ((), classes) if isinstance(classes, int) else (tuple(classes), len(classes))
    mean, std, normalised = _normalisation(parts[0][0], cfg, where)
    listed = [f"{code} {one_line(name)}" for code, name in enumerate(names[:MAX_LISTED])]
    listed += ["..."] if len(names) > MAX_LISTED else []
    extra = repr(((mean, std), count)).encode()
    result = image_set("images", parts, (mean, std), text=origin, extra=extra)
    notes = (*notes, normalised, f"{count} classes" + (f": {', '.join(listed)}" if names else ""))
    known = {"num_classes": count, "class_names": names, "resize": cfg.resize}
    return replace(result, notes=notes, **known)  # type: ignore[arg-type]


def _check_images(part: LazyArray, cfg: DataConfig) -> tuple[int, int, int]:
    shape = part.shape
    supported = part.dtype == np.uint8 or part.dtype.kind == "f"
    allowed = "be uint8, from 0 to 255, or float, from 0 to 1"
    remedy = TYPE_REMEDIES.get(part.dtype.kind, "Give the images as such numbers.")
    check_data(supported, f"{part.name} has type {part.dtype}", allowed, remedy=remedy)
    layout = f"{cfg.path}layout={cfg.layout}"
    last = cfg.layout == "nhwc"
    order = f"[images, {'height, width, 1 or 3' if last else '1 or 3, height, width'}]"
    order = f"be {order}, or [images, height, width]"
    problem = f"{part.name} has shape {list(shape)}"
    check_data(len(shape) in (3, 4), problem, f"{order}, with {layout}")
    full = shape if len(shape) == 4 else (*shape, 1) if last else (shape[0], 1, *shape[1:])
    height, width, channels = full[1:] if last else (*full[2:], full[1])
    if channels not in (1, IMAGE_CHANNELS):
        problem += f", which is {channels} channels with {layout}"
        check_data(False, problem, order, remedy=_channel_remedy(shape, cfg))
    problem = f"{part.name} has {shape[0]} images"
    check_data(1 <= shape[0] <= MAX_IMAGES, problem, f"have 1 to {MAX_IMAGES}")
    problem = f"{part.name} has images of {height}x{width} pixels"
    remedy = f"Hosts see {cfg.size}x{cfg.size}: give smaller ones."
    fits = min(height, width) >= 1 and max(height, width) <= pictures.MOST_SIDE
    check_data(fits, problem, f"have 1 to {pictures.MOST_SIDE} a side", remedy=remedy)
    return height, width, channels


def _channel_remedy(shape: tuple[int, ...], cfg: DataConfig) -> str:
    other, place, at = ("nchw", "second", 1) if cfg.layout == "nhwc" else ("nhwc", "last", 3)
    if shape[at] in (1, IMAGE_CHANNELS):
        return f"Give {cfg.path}layout={other} if channels are the {place} index."
    if shape[1] == shape[2] == shape[3]:
        return "Volumes, as in MedMNIST's 3D sets, cannot be used."
    return "Leave transparency and further channels out."


def _labels(part: LazyArray, images: LazyArray) -> np.ndarray:
    shape = part.shape
    problem = f"{part.name} has shape {list(shape)}"
    allowed = "be [images] or [images, 1]"
    if len(shape) == 2 and shape[1] != 1:
        remedy = "Sets with several labels per image, as ChestMNIST, cannot be used; "
        remedy += "of one-hot labels take .argmax(1)."
        check_data(False, f"{problem}, {shape[1]} labels per image", allowed, remedy=remedy)
    check_data(len(shape) in (1, 2), problem, allowed)
    problem = f"{part.name} has {shape[0]} labels, but {images.name} has {images.shape[0]} images"
    check_data(shape[0] == images.shape[0], problem, "be as many")
    allowed = "be whole numbers, the classes from 0 on"
    problem = f"{part.name} has type {part.dtype}"
    remedy = "Convert with .astype(numpy.int64)."
    if part.dtype.kind in "SU":
        remedy = "Number all parts alike: numpy.searchsorted(numpy.unique(train_labels), labels)."
    check_data(part.dtype.kind in "iu", problem, allowed, remedy=remedy)
    values = part.whole().reshape(-1)
    is_bad = (values < 0) | (values >= MAX_CLASSES)
    at = int(is_bad.argmax())
    allowed = f"be classes from 0 to {MAX_CLASSES - 1} at most"
    problem = f"{part.name} holds {values[at]} at {at}"
    check_data(not is_bad[at], problem, allowed, remedy="Number them from 0 on.")
    return values.astype(np.int64)


def _num_classes(
    labels: Mapping[str, np.ndarray], parts: Mapping[str, LazyArray], names: Sequence[str]
) -> int:
    last, name = max((int(values.max()), name) for name, values in labels.items())
    where = parts[f"{name}_labels"].name
    if not names:
        check_data(last > 0, f"{where}: all labels are 0", "be of at least 2 classes")
        return last + 1
    is_text = all(isinstance(name, str) and name.strip() for name in names)
    different = is_text and len(set(names)) == len(names) and 2 <= len(names) <= MAX_CLASSES
    allowed = f"2 to {MAX_CLASSES} different texts, none empty"
    check(different, CLASS_NAMES, ", ".join(map(str, names)), allowed=allowed)
    allowed = f"be at most {len(names) - 1}, as {CLASS_NAMES} has {len(names)}"
    remedy = "Name every class, or none."
    check_data(last < len(names), f"{where} holds {last}", allowed, remedy=remedy)
    return len(names)


def inner_size(height: int, width: int, cfg: DataConfig) -> tuple[int, int]:
    """Pixels of what hosts see that such images take by cfg.resize; raises SettingError."""
    size = cfg.size
    allowed = f"auto, scale or stretch for images of {height}x{width} pixels"
    fits = cfg.resize != "pad" or max(height, width) <= size
    cfg.require(fits, "resize", allowed, remedy=f"Hosts see {size}x{size}.")
    return pictures.inner_size(height, width, cfg.resize, size=size)


def resize_text(height: int, width: int, cfg: DataConfig) -> str:
    """Words for what becomes of such images."""
    size = cfg.size
    inner = inner_size(height, width, cfg)
    if (height, width) == (size, size):
        return f"{size}x{size} pixels, taken as they are"
    text = f"{height}x{width} pixels"
    if inner != (height, width):
        smaller = " and antialiased" if height > inner[0] or width > inner[1] else ""
        text += f", scaled to {inner[0]}x{inner[1]} (bilinear{smaller})"
    if inner != (size, size):
        text += f", put in the middle of {size}x{size} black pixels"
    return f"{text} ({cfg.path}resize={cfg.resize})"


def _range_remedy(part: LazyArray) -> str:
    """A way to make numbers from 0 to 1 of those of the part, by where they lie."""
    if not all(np.isfinite(rows).all() for rows in part.rows(CHUNK_BYTES)):
        return "Replace what is not a number."
    low = min(float(rows.min(initial=0)) for rows in part.rows(CHUNK_BYTES))
    high = max(float(rows.max(initial=1)) for rows in part.rows(CHUNK_BYTES))
    if low > -ROUNDING_ERROR and high < 1 + ROUNDING_ERROR:
        return "Cut off what rounding has added, with .clip(0, 1)."
    if low < 0:
        return "Take numbers from -1 to 1 as (x + 1) / 2; undo other normalisations first."
    return f"Divide by {255 if high <= 255 else 'the value of white, 65535 in 16 bits'}."


def _as_color(
    part: LazyArray, cfg: DataConfig, size: tuple[int, int, int], inner: tuple[int, int]
) -> np.ndarray:
    result = np.empty((part.shape[0], cfg.size, cfg.size, cfg.channels), np.uint8)
    first = 0
    for rows in part.rows(CHUNK_BYTES):
        if rows.dtype != np.uint8:
            is_bad = ~((rows >= 0) & (rows <= 1))  # NaN is neither
            if is_bad.any():
                at = np.argwhere(is_bad)[0]
                problem = f"{part.name} holds {rows[tuple(at)]} in image {first + int(at[0])}"
                check_data(False, problem, "be from 0 to 1", remedy=_range_remedy(part))
            rows = np.rint(rows.astype(np.float64) * 255).astype(np.uint8)
        if rows.ndim == 4 and cfg.layout == "nchw":
            rows = np.moveaxis(rows, 1, 3)
        few = lazy_array(part.name, rows.reshape(-1, *size))
        for images in few.rows(SCALED_AT_ONCE * math.prod(size)):
            levels = torch.tensor(images)
            levels = pictures.as_channels(levels, 1) if cfg.channels == 1 else levels
            # grey: to all channels
            result[first : first + len(images)] = pictures.fit(levels, inner, cfg.size).numpy()
            first += len(images)
    return result


def _normalisation(
    images: np.ndarray, cfg: DataConfig, name: str
) -> tuple[Statistics, Statistics, str]:
    mean = list(cfg.mean)
    std = list(cfg.std)
    end = f", as {cfg.path}mean says"
    if not mean:
        levels = np.arange(256)
        for counts in level_counts(images):
            total, first, second = (int(counts @ levels**power) for power in range(3))
            spread = total * second - first**2  # whole numbers: the same on every machine
            mean.append(first / total / 255)
            std.append(math.sqrt(spread) / total / 255 if spread else 0.0)
        constant = [name for name, value in zip(COLOUR_NAMES, std, strict=False) if not value]
        if not any(std):
            raise DataError(f"{name}: every pixel of the training images is the same.")
        end = " of the training images"
        end += f"; {' and '.join(constant)} never varies" if constant else ""
        std = [value or 1.0 for value in std]
    means = tuple(map(float, mean)) * (cfg.channels // len(mean))
    stds = tuple(map(float, std)) * (cfg.channels // len(std))
    texts = (", ".join(f"{value:.4f}" for value in values) for values in (means, stds))
    return means, stds, f"normalised by mean {' and deviation '.join(texts)}{end}"


def level_counts(images: np.ndarray) -> np.ndarray:
    """How often every byte occurs in each channel: int64 [C, 256] of uint8 [M, S, S, C]."""
    channels = torch.from_numpy(images).unbind(3)
    return np.stack([channel.flatten().bincount(minlength=256).numpy() for channel in channels])


def _size(height: int, width: int, channels: int) -> str:
    return f"{height}x{width} pixels with {channels} channel{'s' if channels > 1 else ''}"


def channel_text(given: int, due: int) -> str:
    """Words for what becomes of the channels of images; "" for nothing."""
    if given == due:
        return ""
    repeated = "grey: the one channel is repeated, as hosts have three"
    return repeated if given == 1 else "colours become grey, as hosts have one channel"


def _notes(parts: Sequence[LazyArray], channels: str) -> list[str]:
    notes = [channels] * bool(channels)
    floats = dict.fromkeys(part.dtype.name for part in parts if part.dtype.kind == "f")
    if floats:
        notes.append(f"{' and '.join(floats)} from 0 to 1, rounded to 256 levels")
    return notes
