"""Sets of a user's images: `esper_soa.images` makes one, `esper_soa.check_images` looks at it."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import PREPARATION, DataConfig
from esper_soa.nets.data import folder
from esper_soa.nets.data.image_preparation import NPZ_KEYS, level_counts, prepare, read_images
from esper_soa.nets.data.image_set import MAX_COMMON, ImageSet, hashes
from esper_soa.nets.data.npz import lazy_array
from esper_soa.system.errors import SettingError, check, one_line
from esper_soa.system.torch_state import package_state

LOGGER = logging.getLogger("esper_soa")
FEW_IMAGES = 10  # of a class in training, below which there is a finding
DARK_LEVEL = 15  # of 255: brightest value, up to which there is a finding
MAX_NAMED = 8  # classes of a finding

Array = np.ndarray | Tensor


class Choices(TypedDict, total=False):
    """Choices for a user's images; all but the two names are those of DataConfig."""

    layout: str  # nhwc (the default): channels last; nchw: channels before height and width
    resize: str  # auto (the default), pad, scale, stretch: how images come to their size
    size: int  # pixels a side, as hosts see them; 32 where left out
    channels: int  # 3 (the default), or 1 for grey
    validation_images: int  # set aside where there is no such part; 0 (the default) = a fifth
    # Mean of values in [0, 1], one for all channels or for each; left out: of training images.
    mean: list[float]
    std: list[float]  # as mean
    class_names: list[str]  # of class 0, 1, ...
    name: str  # of the set, in tables; that of the file where left out, or "images"


@dataclass
class Arguments(DataConfig, path=""):
    """The settings of a run, by the names that arguments have."""


@package_state()
def images(
    train: "str | PathLike[str] | Array",
    train_labels: Array | None = None,
    test: Array | None = None,
    test_labels: Array | None = None,
    val: Array | None = None,
    val_labels: Array | None = None,
    **choices: Unpack[Choices],
) -> ImageSet:
    """A set of your images that simulators take, on the CPU.

    train: the path of an .npz with train_images, train_labels, test_images and test_labels (one of
    MedMNIST's, say), or of a folder that holds a folder of image files for each class, and then
    nothing else; or training images. train, test, val: unsigned bytes, or floats from 0 to 1,
    [images, height, width] or [images, height, width, 1 or 3], [images, 1 or 3, height, width] with
    layout="nchw"; of one size. val: the images that rewards, gates and observations see; without
    them a fixed part of the training images is set aside.
    train_labels, test_labels, val_labels: whole numbers [images] or [images, 1], classes from 0 on.
    Hosts need `task.num_classes` of the set's `num_classes`.

    Grey images are shown in all three channels, and those of another size in 32x32 pixels by the
    rules of docs/images.md; what was done stands in the set's `notes`, in its repr, and in the log
    of every run. SettingError or DataError name the argument, what it is and what it must be.
    """
    name = choices.pop("name", None)
    names = choices.pop("class_names", [])
    check(name is None or isinstance(name, str), "name", name, allowed="a text")
    check(isinstance(names, list | tuple), "class_names", names, allowed="a list of texts")
    known = (*PREPARATION, "validation_images")
    for choice in choices.keys() - set(known):
        remedy = "There are " + ", ".join(known) + "."
        check(False, choice, "...", allowed="left out: there is no such setting", remedy=remedy)
    cfg = Arguments(name="npz", **choices)  # type: ignore[misc]
    others = {"train_labels": train_labels, "test": test, "test_labels": test_labels}
    validation = {"val": val, "val_labels": val_labels}
    if isinstance(train, str | PathLike):
        for argument, value in (others | validation).items():
            allowed = "left out: train is a file, which holds all parts"
            check(value is None, argument, "...", allowed=allowed)
        cfg.root = fspath(train)
        if os.path.isdir(cfg.root):
            check(not names, "class_names", names, allowed="left out: folders have the names")
            result = folder.read_images(cfg, "handed over", setting="train")
        else:
            result = read_images(cfg, "handed over", names, setting="train")
    else:
        given = {"train": train} | others
        if val is not None or val_labels is not None:
            given |= validation
        parts = {
            key: lazy_array(argument, _numpy(argument, value))
            for key, (argument, value) in zip(NPZ_KEYS, given.items(), strict=False)
        }
        result = prepare(parts, cfg, names, origin="own images from arrays, handed over")
    result = replace(result, name=name or result.name)
    LOGGER.info("data     %s", result)
    return result


def _numpy(argument: str, value: object) -> np.ndarray:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        allowed = "a numpy array or a torch tensor"
        remedy = "Lists become one with numpy.stack, masked arrays with .filled(0)."
        raise SettingError(argument, type(value).__name__, allowed, remedy=remedy)
    return value


@package_state()
def check_images(data: "ImageSet | str | PathLike[str]") -> list[str]:
    """Messages on properties of a set, a file or a folder that would spoil results; [] for none.

    Classes without images or with few, or one so frequent that a constant answer scores; images
    that are in both parts, there twice, or twice under different labels; images of one colour;
    parts that are not of one brightness. Validation images count as training images.
    """
    image_set = (images(data) if isinstance(data, str | PathLike) else data).to("cpu")
    image_set = replace(
        image_set,
        train_images=torch.cat((image_set.train_images, image_set.val_images)),
        train_labels=torch.cat((image_set.train_labels, image_set.val_labels)),
    )
    train = image_set.train_images.numpy()
    test = image_set.test_images.numpy()
    return [
        *_classes(image_set),
        *_twice(train, image_set.train_labels.tolist(), test),
        *_plain({"training": train, "test": test}),
        *_brightness(train, test),
    ]


def _classes(images: ImageSet) -> Iterator[str]:
    count = images.num_classes or 1 + int(max(images.train_labels.max(), images.test_labels.max()))
    train = images.train_labels.bincount(minlength=count).numpy()
    test = images.test_labels.bincount(minlength=count).numpy()
    if not train[0] and not test[0]:
        yield "Class 0 has no image: do labels count from 1? They must count from 0."
    for is_bad, what in (
        (train == 0, "no training image"),
        (test == 0, "no test image"),
        ((train > 0) & (train < FEW_IMAGES), f"fewer than {FEW_IMAGES} training images"),
    ):
        classes = np.flatnonzero(is_bad).tolist()
        if classes:
            words = ("Class", "has") if len(classes) == 1 else ("Classes", "have")
            yield f"{words[0]} {_named(images, classes)} {words[1]} {what}."
    share = test.max() / test.sum()
    if share > max(0.5, 1.5 / count):
        answer = "who always answers so is as often right, and accuracy says little"
        most = _named(images, [int(test.argmax())])
        yield f"{share:.0%} of the test images are of class {most}: {answer}."


def _named(images: ImageSet, classes: list[int]) -> str:
    names = images.class_names
    first = classes[:MAX_NAMED]
    texts = [f"{code} ({one_line(names[code])})" if names else str(code) for code in first]
    more = f" and {len(classes) - MAX_NAMED} more" if len(classes) > MAX_NAMED else ""
    return ", ".join(texts) + more


def _twice(train: np.ndarray, labels: list[int], test: np.ndarray) -> Iterator[str]:
    train_hashes = hashes(train)
    first = dict(zip(train_hashes[::-1], labels[::-1], strict=True))  # labels when first seen
    again = len(train_hashes) - len(first)
    other = sum(first[code] != label for code, label in zip(train_hashes, labels, strict=True))
    common = sum(code in first for code in hashes(test))
    if common > MAX_COMMON * len(test):
        some = f"{common} of {len(test)} test images"
        yield f"{some} are training images too: accuracy will be flattered."
    if again > MAX_COMMON * len(train):
        yield f"{again} of {len(train)} training images repeat another one."
    if other:
        yield f"{other} training images are there before under another label."


def _plain(parts: dict[str, np.ndarray]) -> Iterator[str]:
    """Images of one colour, within pixels that are not black in all of them: borders are black."""
    non_zero = np.logical_or(*(part.max(axis=(0, 3)) > 0 for part in parts.values()))
    rows, columns = (np.flatnonzero(non_zero.any(axis)) for axis in (1, 0))
    for name, part in parts.items():
        inner = part[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        count = int((inner.max(axis=(1, 2)) == inner.min(axis=(1, 2))).all(axis=1).sum())
        if count:
            yield f"{count} of {len(part)} {name} images are of one colour: is something missing?"


def _brightness(train: np.ndarray, test: np.ndarray) -> Iterator[str]:
    counts = level_counts(train).sum(0)
    others = level_counts(test).sum(0)
    brightest = int(np.flatnonzero(counts).max())
    if brightest <= DARK_LEVEL:
        hint = "were values from 0 to 1, or class numbers, stored as bytes?"
        yield f"The brightest value of the training images is {brightest} of 255: {hint}"
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum()
    other = others @ levels / others.sum()
    if abs(other - mean) > float(np.sqrt(counts @ (levels - mean) ** 2 / counts.sum())):
        comparison = f"a mean brightness of {mean:.2f}, test images of {other:.2f}"
        yield f"Training images have {comparison}: were both prepared in one way?"
