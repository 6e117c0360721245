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

from esper_soa.config.nets import DataConfig
from esper_soa.config.paths import user_path
from esper_soa.nets.data import image_preparation as preparation
from esper_soa.nets.data.image_set import MOST_ASIDE, ImageSet
from esper_soa.nets.data.kept import keep, kept, kept_folder
from esper_soa.nets.data.orders import random_permutations
from esper_soa.nets.model import pictures
from esper_soa.system.errors import DataError, check_data, one_line
from esper_soa.system.plain_files import FOLDER, OTHER, list_folder, open_plain

# Endings of files that are read; others are left out unread.
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".pgm", ".ppm")
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SHARE = 5  # the test and the validation part, where there is none, are each one of so many
SPLIT_KEYS = {"test": 7, "val": 6}  # keys of the shuffles that choose them
MOST_BYTES = 1 << 28  # of a file
MAX_NAMED = 3  # files that are left out for one reason, by name
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
    part: str  # train, val, test; train too where the folder has no parts
    label: str  # name of its class


def count_images(cfg: DataConfig) -> tuple[int, int]:
    """Numbers of training and other images in the folder `cfg.root`, those to set aside included
    with the former.
    """
    parts = Counter(file.part for file in list_images(user_path("data.root", cfg.root))[0])
    return parts["train"], parts["val"] + parts["test"]


def count_classes(cfg: DataConfig) -> int:
    """The number of classes that the folder `cfg.root` has images of."""
    return len({file.label for file in list_images(user_path("data.root", cfg.root))[0]})


def list_images(root: Path) -> tuple[list[ImageFile], list[tuple[str, str]]]:
    """The image files below the folder `root`, and of what is left out reasons and names."""
    top = root.resolve()
    files = list[ImageFile]()
    left_out = list[tuple[str, str]]()
    folders = (path.name.lower() for path, kind in list_folder(top).items() if kind == FOLDER)
    has_parts = "train" in {name for name in folders if name[0] != "."} <= PARTS.keys()
    # folders, and the names of those above them that say something
    waiting: list[tuple[Path, tuple[str, ...]]] = [(top, ())]
    while waiting:
        folder, words = waiting.pop()
        for path, kind in list_folder(folder).items():
            name = _text(str(path.relative_to(top)))
            is_image = path.suffix.lower() in ENDINGS
            if path.name.startswith("."):
                left_out.append(("hidden", name))
            elif kind == FOLDER:
                waiting.append((path, (*words, path.name)[: 1 + has_parts]))
            elif kind == OTHER:
                left_out.append(("links, pipes or devices", name))
            elif is_image and len(words) == 1 + has_parts:
                part = PARTS[words[0].lower()] if has_parts else "train"
                files.append(ImageFile(path, name, part, label=_text(words[-1])))
            else:
                left_out.append(("in no class folder" if is_image else "of other endings", name))
    return sorted(files), sorted(left_out)


def _text(name: str) -> str:
    """A name as text, however a system writes its accents."""
    return unicodedata.normalize("NFC", os.fsencode(name).decode(errors="replace"))


def read_images(cfg: DataConfig, reason: str, setting: str = "data.root") -> ImageSet:
    """The images below the folder `cfg.root`, which `setting` names, taken for the `reason`.

    DataError for a folder without images of two classes; what cannot be read is told in the notes.
    """
    path = user_path(setting, cfg.root)
    where = f"{setting}={one_line(cfg.root)}"
    if find_spec("PIL") is None:
        raise DataError(f"{where}: needs Pillow: pip install 'esper-soa[images]'")
    check_data(path.is_dir(), where, "be a folder that holds a folder for each class")
    files, left_out = list_images(path)
    names = sorted({file.label for file in files})
    remedy = f"Files end in {', '.join(ENDINGS)}. {left_out_text(left_out)}".strip()
    found = f"{where}: holds images of {len(names)} classes"
    allowed = "hold a folder of images for each of 2 or more"
    check_data(len(names) > 1, found, allowed, remedy=remedy)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n".encode())
        digest.update(hashlib.sha256(_content(file)).digest())
    sha256 = digest.hexdigest()
    facts, pixels = _read_or_kept(files, cfg, sha256)
    faults = zip(files, facts[:, 0].tolist(), strict=True)
    left_out += [(FAULTS[fault - 1][1], file.name) for file, fault in faults if fault]
    remedy = left_out_text(left_out)
    codes = {name: code for code, name in enumerate(names)}
    labels = np.array([codes[file.label] for file in files], np.int64)
    parts = np.array([file.part for file in files])
    places = {name: np.flatnonzero((parts == name) & (facts[:, 0] == 0)) for name in PARTS}
    problem = f"{where}: holds no training image that can be read"
    check_data(bool(len(places["train"])), problem, "hold some", remedy=remedy)
    notes = [*_notes(facts, cfg), *_fill_parts(places, labels, cfg), *[remedy] * bool(remedy)]
    result = preparation.user_set(
        [(pixels[places[part]], labels[places[part]]) for part in ("train", "val", "test")],
        cfg,
        names,
        notes=notes,
        origin=f"own images from {one_line(cfg.root)} (sha256 {sha256[:12]}..., {reason})",
        where=f"{where}: train",
    )
    return replace(result, name=one_line(path.resolve().name), file_sha256=sha256)


def _fill_parts(
    places: dict[str, np.ndarray], labels: np.ndarray, cfg: DataConfig
) -> Iterator[str]:
    """Set training images aside in `places` for the parts that have none; gives notes on them."""
    allowed = "0 where there is a folder val, which is the validation part"
    cfg.require(not (len(places["val"]) and cfg.validation_images), "validation_images", allowed)
    for part, key in SPLIT_KEYS.items():
        if not len(places[part]):
            total = len(places["train"])
            asked = cfg.validation_images if part == "val" else 0
            split = set_aside_by_class(places["train"], labels, asked, key=key)
            allowed = f"so few that something of {total} images is left for each part"
            cfg.require(min(map(len, split)) > 0, "validation_images", allowed)
            places["train"], places[part] = split
            yield f"{part}: set aside from training, of each class the same share"


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


def _read_or_kept(
    files: Sequence[ImageFile], cfg: DataConfig, sha256: str
) -> tuple[np.ndarray, np.ndarray]:
    """Facts int32 [F, 4] of the files (number of the fault or 0, height, width, channels), and
    their images as hosts see them, uint8 [F, S, S, C]; from the cache folder where they are there.
    """
    pillow = import_module("PIL").__version__
    key = repr((VERSION, sha256, cfg.resize, cfg.image_shape, pillow))
    path = None
    with suppress(DataError):  # they are read anew then
        path = kept_folder("images") / f"{hashlib.sha256(key.encode()).hexdigest()}.images"
    shape = len(files), cfg.size, cfg.size, cfg.channels
    head = 16 * len(files)
    stored = kept(path, np.dtype(np.uint8)) if path else None
    if stored is None or len(stored) != head + math.prod(shape):
        stored = np.zeros(head + math.prod(shape), np.uint8)
        images = stored[head:].reshape(shape)
        _read(files, cfg, stored[:head].view(np.int32).reshape(-1, 4), pixels=images)
        if path:
            with suppress(DataError):
                keep(path, stored)
    return stored[:head].view(np.int32).reshape(-1, 4), stored[head:].reshape(shape)


def _read(
    files: Sequence[ImageFile], cfg: DataConfig, facts: np.ndarray, pixels: np.ndarray
) -> None:
    """Write facts and images of the files."""
    for number, file in enumerate(files):
        try:
            levels = pictures.levels_of_file(io.BytesIO(_content(file)))
        except Exception as error:  # noqa: BLE001 (what Pillow raises for what is broken)
            kinds = enumerate(FAULTS, 1)
            facts[number, 0] = next(at for at, (kind, _) in kinds if isinstance(error, kind))
            continue
        facts[number, 1:] = levels.shape
        inner = preparation.inner_size(levels.shape[0], levels.shape[1], cfg)
        levels = pictures.as_channels(levels, cfg.channels)
        pixels[number] = pictures.fit(levels[None], inner, cfg.size)[0].numpy()


def _content(file: ImageFile) -> bytes:
    """The bytes of a plain file; none where it cannot be read or has more than MOST_BYTES."""
    try:
        with os.fdopen(open_plain(file.path), "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MOST_BYTES else b""


def _notes(facts: np.ndarray, cfg: DataConfig) -> Iterator[str]:
    """Words for what was done to the images of these `facts`."""
    read = facts[facts[:, 0] == 0]
    sizes = np.unique(read[:, 1:3], axis=0)
    text = (
        f"{len(sizes)} size{'s' * (len(sizes) > 1)} of {sizes.min()} to {sizes.max()} pixels a side"
    )
    yield f"{text}, each brought to {cfg.size}x{cfg.size} ({cfg.path}resize={cfg.resize})"
    for channels, count in zip(*np.unique(read[:, 3], return_counts=True), strict=True):
        if text := preparation.channel_text(channels, cfg.channels):
            yield f"{count:,} {text}"
