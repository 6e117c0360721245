"""Reads image files of a folder for each class, or of such folders in train, val and test.

The files are not trusted: links are not followed, Pillow is asked for a few kinds of files and a
bounded number of pixels, and what cannot be read is left out, counted and named. Images as hosts
see them are kept in the user's cache folder.
"""

import hashlib
import io
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, DataConfig
from esper_soa.config.paths import user_path
from esper_soa.nets.data.image_preparation import Classes, inner_size, resize_text, user_set
from esper_soa.nets.data.image_set import MOST_ASIDE, ImageSet
from esper_soa.nets.data.kept import keep, kept, kept_folder
from esper_soa.nets.data.orders import random_permutations
from esper_soa.nets.model import pictures
from esper_soa.system.errors import DataError, check_data, one_line
from esper_soa.system.plain_files import FILE, FOLDER, OTHER, list_folder, open_plain

# Endings of files that are read; others are left out unread.
ENDINGS = (
    *(".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp"),
    *(".pbm", ".pgm", ".ppm"),
)
# Names of folders that hold the class folders of a part, in small letters.
PART_FOLDERS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
PARTS = ("train", "val", "test")
SHARE = 5  # the test and the validation part, where there is none, are each one of so many
SPLIT_KEYS = {"val": 6, "test": 7}  # keys of the shuffles that choose them
MOST_BYTES = 1 << 28  # of a file
MAX_NAMED = 3  # files that are left out for one reason, by name
LINK = "links, pipes or devices"
FAULTS = (  # errors of reading, and what they say of a file; its number counts from 1
    (pictures.TooManyPixelsError, f"of more than {pictures.MOST_PIXELS:,} pixels"),
    (pictures.NoLevelsError, "of numbers that are no levels of 8 or 16 bits"),
    (Exception, "broken, cut off or of more than 256 MiB"),
)
VERSION = 1  # of what is kept


class ImageFile(NamedTuple):
    """An image file of a folder."""

    path: Path
    name: str  # below the folder
    part: str  # one of PARTS; "" where the folder has none
    label: str  # name of its class


class Listing(NamedTuple):
    """Image files of the folder `top`, and what else is there."""

    top: Path
    files: list[ImageFile]
    left_out: list[tuple[str, str]]  # reason and name

    def name(self, path: Path) -> str:
        """The path below the folder as text."""
        return _text(str(path.relative_to(self.top)))


def count_folder(cfg: DataConfig) -> tuple[int, int]:
    """Numbers of training and other images in the folder `cfg.root`, those to set aside included
    with the former.
    """
    parts = Counter(file.part for file in list_images(user_path("data.root", cfg.root)).files)
    others = parts["val"] + parts["test"]
    return parts.total() - others, others


def list_images(root: Path) -> Listing:
    """The image files below the folder `root`, by name, and what is left out."""
    top = root.resolve()
    listing = Listing(top, [], [])
    kinds = list_folder(top)
    parts = {
        path: PART_FOLDERS.get(path.name.lower(), "")
        for path, kind in kinds.items()
        if kind == FOLDER
    }
    has_parts = "train" in parts.values()
    for path, part in parts.items():
        if not has_parts:
            _list_class(path, "", listing)
        elif part:
            for place, kind in list_folder(path).items():
                if kind == FOLDER:
                    _list_class(place, part, listing)
                else:
                    _leave_out(place, kind, listing)
        else:
            listing.left_out.append(("folders beside train, val and test", listing.name(path)))
    for path, kind in kinds.items():
        if kind != FOLDER:
            _leave_out(path, kind, listing)
    return listing


def _list_class(folder: Path, part: str, listing: Listing) -> None:
    label = _text(folder.name)
    waiting = [folder]
    while waiting:
        for path, kind in list_folder(waiting.pop()).items():
            if kind == FOLDER:
                waiting.append(path)
            elif kind == FILE and _is_image(path):
                listing.files.append(ImageFile(path, listing.name(path), part, label=label))
            else:
                _leave_out(path, kind, listing)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS and not path.name.startswith(".")


def _leave_out(path: Path, kind: str, listing: Listing) -> None:
    reason = "in no class folder" if _is_image(path) else "of other endings"
    listing.left_out.append((LINK if kind == OTHER else reason, listing.name(path)))


def _text(name: str) -> str:
    """A name as text, however a system writes its accents."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode(errors="replace"))


def read_folder(cfg: DataConfig, reason: str, setting: str = "data.root") -> ImageSet:
    """The images below the folder `cfg.root`, which `setting` names, taken for the `reason`.

    DataError for a folder without images of two classes; what cannot be read is told in the notes.
    """
    path = user_path(setting, cfg.root)
    where = f"{setting}={one_line(cfg.root)}"
    if find_spec("PIL") is None:
        raise DataError(f"{where}: needs Pillow: pip install 'esper-soa[images]'")
    check_data(path.is_dir(), where, "be a folder that holds a folder for each class")
    listing = list_images(path)
    names = sorted({file.label for file in listing.files})
    remedy = f"Files end in {', '.join(ENDINGS)}. {left_out_text(listing.left_out)}".strip()
    found = f"{where}: holds images of {len(names)} classes"
    allowed = "hold a folder of images for each of 2 or more"
    check_data(len(names) > 1, found, allowed, remedy=remedy)
    digest = hashlib.sha256()
    for file in listing.files:
        digest.update(f"{file.name}\n".encode())
        digest.update(hashlib.sha256(_content(file)).digest())
    sha256 = digest.hexdigest()
    images = _read_or_kept(listing.files, cfg, sha256)
    faults = images.facts[:, 0].tolist()
    left_out = listing.left_out + [
        (FAULTS[fault - 1][1], file.name)
        for file, fault in zip(listing.files, faults, strict=True)
        if fault
    ]
    codes = {name: code for code, name in enumerate(names)}
    labels = np.array([codes[file.label] for file in listing.files], np.int64)
    whole = np.flatnonzero(images.facts[:, 0] == 0)
    remedy = left_out_text(left_out)
    places = {part: np.empty(0, np.int64) for part in PARTS}
    for part in {file.part for file in listing.files}:
        has_part = np.array([file.part == part for file in listing.files])
        places[part or "train"] = whole[has_part[whole]]
    problem = f"{where}: holds no training image that can be read"
    check_data(bool(len(places["train"])), problem, "hold some", remedy=remedy)
    notes = [*_notes(images.facts, f"{cfg.path}resize={cfg.resize}")]
    notes += _fill_parts(places, labels, cfg)
    result = user_set(
        [(images.pixels[places[part]], labels[places[part]]) for part in PARTS],
        cfg,
        Classes(len(names), tuple(names)),
        notes=notes + [remedy] * bool(remedy),
        origin=f"own images from {one_line(cfg.root)} (sha256 {sha256[:12]}..., {reason})",
        where=f"{where}: train",
        rule=cfg.resize,
    )
    return replace(result, name=one_line(path.resolve().name), file_sha256=sha256)


def _fill_parts(places: dict[str, np.ndarray], labels: np.ndarray, cfg: DataConfig) -> list[str]:
    """Set training images aside in `places` for the parts that have none; returns notes on them."""
    asked = {"test": 0, "val": cfg.validation_images}
    allowed = "0 where there is a folder val, which is the validation part"
    cfg.require(not (len(places["val"]) and asked["val"]), "validation_images", allowed)
    empty = [part for part in asked if not len(places[part])]
    for part in empty:
        train, aside = set_aside_by_class(
            places["train"], labels, asked[part], key=SPLIT_KEYS[part]
        )
        allowed = f"so few that something of {len(places['train'])} images is left for each part"
        remedy = "Or give more images."
        fits = len(train) > 0 < len(aside)
        cfg.require(fits, "validation_images", allowed, remedy=remedy)
        places |= {"train": train, part: aside}
    named = " and ".join(empty)
    return [f"{named}: set aside from training, of each class the same share"] * bool(empty)


def set_aside_by_class(
    places: np.ndarray, labels: np.ndarray, asked: int, key: int
) -> tuple[np.ndarray, np.ndarray]:
    """`places` [M] without some, and those: as many as asked for (0 = a fifth, at most MOST_ASIDE),
    of every class the same share, by a fixed shuffle, so that all runs leave the same out.
    """
    count = asked or min(len(places) // SHARE, MOST_ASIDE)
    shuffled = random_permutations(torch.tensor([key]), len(places))[0].numpy()
    share = np.empty(len(places))  # of the images of its class that stand before an image
    for label in np.unique(labels[places]):
        of_class = shuffled[labels[places[shuffled]] == label]
        share[of_class] = (np.arange(len(of_class)) + 0.5) / len(of_class)
    aside = np.zeros(len(places), bool)
    aside[shuffled[np.argsort(share[shuffled], kind="stable")[:count]]] = True
    return places[~aside], places[aside]


def left_out_text(left_out: Sequence[tuple[str, str]]) -> str:
    """How many files are left out, why, and the first of them by name; "" for none."""
    texts = []
    for reason, count in Counter(reason for reason, _ in left_out).items():
        named = [one_line(name) for why, name in left_out if why == reason][:MAX_NAMED]
        more = ", ..." if count > MAX_NAMED else ""
        texts.append(f"{count:,} {reason} ({', '.join(named)}{more})")
    return f"left out: {'; '.join(texts)}" if texts else ""


class Prepared(NamedTuple):
    """Images as hosts see them."""

    facts: np.ndarray  # int32 [F, 4]: number of the fault or 0, height, width, channels of the file
    pixels: np.ndarray  # uint8 [F, S, S, C]


def _read_or_kept(files: Sequence[ImageFile], cfg: DataConfig, sha256: str) -> Prepared:
    """The images of the files, from the cache folder where they were read before."""
    pillow = import_module("PIL").__version__
    key = repr((VERSION, sha256, cfg.resize, IMAGE_SIZE, IMAGE_CHANNELS, pillow))
    path = None
    with suppress(DataError):  # they are read anew then
        path = kept_folder("images") / f"{hashlib.sha256(key.encode()).hexdigest()}.images"
    head = 4 * 4 * len(files)
    shape = len(files), IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS
    stored = kept(path, np.dtype(np.uint8)) if path else None
    if stored is not None and len(stored) == head + math.prod(shape):
        facts = stored[:head].view(np.int32).reshape(-1, 4)
        return Prepared(facts, stored[head:].reshape(shape))
    result = Prepared(np.zeros((len(files), 4), np.int32), np.zeros(shape, np.uint8))
    for number, file in enumerate(files):
        try:
            levels = pictures.levels_of_file(io.BytesIO(_content(file)))
        except Exception as error:  # noqa: BLE001 (what Pillow raises for what is broken)
            kinds = [kind for kind, _ in FAULTS]
            fault = next(at for at, kind in enumerate(kinds, 1) if isinstance(error, kind))
            result.facts[number] = fault, 0, 0, 0
            continue
        height, width, channels = levels.shape
        result.facts[number] = 0, height, width, channels
        inner = inner_size(height, width, cfg.resize, setting=f"{cfg.path}resize")
        levels = pictures.as_channels(levels, IMAGE_CHANNELS)
        result.pixels[number] = pictures.fit(levels[None], inner, IMAGE_SIZE)[0].numpy()
    if path:
        with suppress(DataError):
            whole = result.facts.reshape(-1).view(np.uint8), result.pixels.reshape(-1)
            keep(path, np.concatenate(whole))
    return result


def _content(file: ImageFile) -> bytes:
    """The bytes of a plain file; none where it cannot be read or has more than MOST_BYTES."""
    try:
        with os.fdopen(open_plain(file.path), "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MOST_BYTES else b""


def _notes(facts: np.ndarray, reason: str) -> Iterator[str]:
    """Words for what was done to the images of these `facts`."""
    read = facts[facts[:, 0] == 0]
    sizes = np.unique(read[:, 1:3], axis=0)
    if len(sizes) == 1:
        height, width = map(int, sizes[0])
        rule = reason.partition("=")[2]
        yield resize_text((height, width), inner_size(height, width, rule, setting=reason), reason)
    else:
        text = f"{len(sizes)} sizes of {sizes.min()} to {sizes.max()} pixels a side"
        yield f"{text}, each brought to {IMAGE_SIZE}x{IMAGE_SIZE} ({reason})"
    num_grey = int((read[:, 3] == 1).sum())
    if num_grey:
        yield f"{num_grey:,} grey: the one channel is repeated, as hosts have three"
