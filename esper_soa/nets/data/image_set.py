"""A data set: images and labels on a device, normalisation and origin."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import DataConfig
from esper_soa.nets.data.batches import BatchSource, Draw, SampleSpec, origin
from esper_soa.nets.data.images import (
    ImageBank,
    Means,
    Statistics,
    TrainingImages,
    ValidationImages,
    image_spec,
    normalisation,
    padded_lines,
)
from esper_soa.nets.data.orders import random_permutations

MAX_COMMON = 0.01  # share of the images that may be there twice
MOST_ASIDE = 5000  # images of a validation part that no setting has the size of
ASIDE_KEY = 5  # key of the shuffle that chooses them

LABEL_FIELDS = ("train_labels", "val_labels", "test_labels")
TENSOR_FIELDS = ("train_images", "val_images", "test_images", *LABEL_FIELDS)  # of an ImageSet

Part = tuple[np.ndarray, np.ndarray]  # images uint8 [M, S, S, C], labels int64 [M]


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Training, validation and test images of C classes on one device: a batches.BatchSource."""

    name: str
    train_images: Tensor  # uint8 [D, S, S, channels]
    train_labels: Tensor  # int64 [D], 0 to C - 1
    val_images: Tensor  # uint8 [V, S, S, channels]
    val_labels: Tensor  # int64 [V]
    test_images: Tensor  # uint8 [E, S, S, channels]
    test_labels: Tensor  # int64 [E]
    mean: Statistics  # per channel, of values in [0, 1]
    std: Statistics
    identity: str  # sha256 of images and labels, and what else hosts see of a user's, hexadecimal
    source: str  # a sentence: where they come from and how many there are
    # C of a user's images, which task.num_classes must be; None: any that holds the labels.
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()  # of class 0, 1, ..., where they have names
    notes: tuple[str, ...] = ()  # what was done to a user's images, a clause each
    file_sha256: str = ""  # of the file of a user's images, hexadecimal
    resize: str = "auto"  # rule of DataConfig by which further images come to their size
    # Where envs take several sets in turn, see `join_sets`: these, and the number of the first env.
    sets: tuple["DatasetEntry", ...] = ()
    first_env: int = 0

    @property
    def spec(self) -> SampleSpec:
        return image_spec(self.train_images.shape[1], self.train_images.shape[-1])

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{name: vars(self)[name].to(device) for name in TENSOR_FIELDS})

    @cached_property
    def banks(self) -> tuple[ImageBank, ImageBank]:
        """The bank of training images, and that of validation and test images: a single one, so
        that a step which an engine keeps serves both. They are made at first use: the world asks
        for validation batches before it plays, so that no env-step waits.
        """
        means: Means = self.mean
        stds: Means = self.std
        if self.sets:
            specs = [entry.source.input_spec() for entry in self.sets]
            means = [spec["mean"] for spec in specs]
            stds = [spec["std"] for spec in specs]
        scaling = normalisation(means, stds, self.train_images.device)
        lines = padded_lines(self.train_images)
        size = self.train_images.shape[1]
        bank = ImageBank(lines, self.train_labels, *scaling, first_env=self.first_env, size=size)
        images = torch.cat((self.val_images, self.test_images)).permute(0, 1, 3, 2).contiguous()
        labels = torch.cat((self.val_labels, self.test_labels))
        return bank, bank._replace(lines=images, labels=labels)

    def training(self, draw: Draw, dtype: torch.dtype) -> TrainingImages:
        """Batches of the samples that `draw` names; augmented images are crops, half mirrored."""
        return TrainingImages(self.banks[0], draw, dtype)

    def validation(self, order: Tensor, dtype: torch.dtype) -> ValidationImages:
        return ValidationImages(self.banks[1], order, dtype)

    def test(self, order: Tensor, dtype: torch.dtype) -> ValidationImages:
        behind = torch.where(order < 0, order, order + len(self.val_labels))
        return ValidationImages(self.banks[1], behind, dtype)

    def input_spec(self) -> dict:
        """Shape and range of images as grown networks take them, how these normalise them, and by
        which rule those of users came to their size.
        """
        spec = {"shape": list(self.spec.shape), "range": [0.0, 1.0], "channels": "RGB"}
        spec["channels"] = "RGB" if self.spec.shape[0] > 1 else "grey"
        spec |= {"mean": list(self.mean), "std": list(self.std)}
        return spec if self.num_classes is None else spec | {"resize": self.resize}

    def samples(self, part: str, places: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 [B, C, S, S] in [0, 1], RGB or grey, and labels int64 [B]."""
        images, labels = {
            "train": (self.train_images, self.train_labels),
            "validation": (self.val_images, self.val_labels),
            "test": (self.test_images, self.test_labels),
        }[part]
        return images[places].permute(0, 3, 1, 2).float() / 255, labels[places]

    def facts(self) -> dict[str, str]:
        record = origin(self)
        for source, *_ in self.sets:
            record |= {f"{source.name}.{name}": fact for name, fact in source.facts().items()}
        if self.sets:
            return record
        record["mean"] = ", ".join(map(repr, self.mean))
        record["std"] = ", ".join(map(repr, self.std))
        if self.num_classes is not None:
            record["classes"] = str(self.num_classes)
            record["class_names"] = json.dumps(self.class_names)
            record["file_sha256"] = self.file_sha256
            record["preparation"] = "; ".join(self.notes)
        return record

    def __repr__(self) -> str:
        """Summary without the tensors."""
        return "\n  ".join([f"{self.name}: {self.source}", *self.notes])


class DatasetEntry(NamedTuple):
    """A data set of a list from which envs take one in turn."""

    source: BatchSource
    train: int = 0  # where its samples begin in the parts of all, see `join_sets`
    validation: int = 0
    test: int = 0


def sets_of(source: BatchSource) -> tuple[DatasetEntry, ...]:
    """The data sets of a source, of which env i takes number i modulo how many there are."""
    sets = source.sets if isinstance(source, ImageSet) else ()
    return sets or (DatasetEntry(source),)


def source_of(source: BatchSource, env: int) -> BatchSource:
    """The data set of an env of the run: that one of `sets_of`."""
    sets = sets_of(source)
    return sets[env % len(sets)].source


def image_set(
    name: str,
    parts: Sequence[Part],
    statistics: tuple[Statistics, Statistics],
    text: str,
    extra: bytes = b"",
) -> ImageSet:
    """A set of a training, a validation and a test part on the CPU.

    Its identity is that of `parts` and `extra`; statistics: mean and deviation; text: its origin.
    """
    arrays = [array for part in parts for array in part]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    digest.update(extra)
    counts = "{:d} training, {:d} validation and {:d} test images".format(*map(len, arrays[::2]))
    train, val, test = (
        (torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in parts
    )
    identity = digest.hexdigest()
    return ImageSet(name, *train, *val, *test, *statistics, identity, f"{text}: {counts}.")


def join_sets(sets: Sequence[ImageSet]) -> ImageSet:
    """One set with the images of all, of which env i takes those of number i modulo how many there
    are; a set may be there several times.
    """
    different = list(dict.fromkeys(sets))
    if len(different) == 1:
        return different[0]
    rows = {name: [vars(images)[name] for images in different] for name in TENSOR_FIELDS}
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    # by set, its part of each: the memory of all is kept once
    views = zip(
        *(whole[name].split(list(map(len, rows[name]))) for name in TENSOR_FIELDS), strict=True
    )
    starts = zip(*([0, *accumulate(map(len, rows[name]))] for name in LABEL_FIELDS), strict=True)
    entries = {
        images: DatasetEntry(replace(images, **dict(zip(TENSOR_FIELDS, view, strict=True))), *start)
        for images, view, start in zip(different, views, starts, strict=False)
    }
    return replace(
        different[0],
        **whole,  # type: ignore[arg-type]
        name="+".join(images.name for images in different),
        identity=hashlib.sha256("".join(images.identity for images in sets).encode()).hexdigest(),
        source=" ".join(images.source for images in different),
        notes=tuple(note for images in different for note in images.notes),
        sets=tuple(entries[images] for images in sets),
    )


def set_aside(train: Part, cfg: DataConfig) -> tuple[Part, Part]:
    """`train` without its validation part, and that: the images that a fixed shuffle puts first, as
    many as cfg.validation_images says, by their number alone, so that all runs leave the same out.
    Both keep their order. SettingError where nothing would be left to train or to validate on.
    """
    images, labels = train
    total = len(labels)
    num_aside = cfg.validation_images or min(total // 5, MOST_ASIDE)
    allowed = f"1 to {total - 1}, so that some of the {total} training images are left"
    cfg.require(0 < num_aside < total, "validation_images", allowed, remedy="Or give more images.")
    aside = np.zeros(total, bool)
    aside[random_permutations(torch.tensor([ASIDE_KEY]), total)[0, :num_aside].numpy()] = True
    return (images[~aside], labels[~aside]), (images[aside], labels[aside])


def hashes(images: np.ndarray) -> list[int]:
    """A number for each image, the same for the same pixels within this process."""
    return [hash(image.tobytes()) for image in images]
