"""Draws batches from an image set that is resident on the device: which images, in which order, how
augmented.

Given an ImageSet and one random stream per env, it returns batches for many envs at once, without a
loop over envs or a copy to the host. What env i gets depends only on its own stream and on how many
samples it has drawn.
"""

from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_soa.config.errors import check
from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.data.datasets import ImageSet
from esper_soa.nets.data.streams import VALIDATION_SET, fold, integers, stream_keys

PADDING = 4  # black pixels around a training image, before normalisation
NUM_SHIFTS = 2 * PADDING + 1  # places of a crop along one side
NUM_CROPS = 2 * NUM_SHIFTS**2  # crops of an image, mirrored or not
PADDED_SIZE = IMAGE_SIZE + 2 * PADDING
LINE = IMAGE_CHANNELS * PADDED_SIZE  # bytes of a padded line
PADDED_BYTES = PADDED_SIZE * LINE  # bytes of a padded image
SORT_ELEMENTS = 1 << 24  # sorted, or looked up, at a time, to bound memory
HELD = 1 << 28  # elements of the orders of a pass, 1 GiB, beyond which they are looked up
# moves along rows and columns in turn; half as many leave a dozen members unevenly placed
ROUNDS = 16


class ImageCrops(NamedTuple):
    """Images that are still to be cut from a bank."""

    bank: "ImageBank"
    # Int64 [n, B]: bytes of the bank at which they begin; n = 1 where networks share them.
    first: Tensor
    labels: Tensor  # int64 [n, B]; -1 does not count


class ImageBank(NamedTuple):
    """Images as batches are cut from them: each line has its red, then green, then blue values."""

    lines: Tensor  # uint8 [M, H, 3, W]
    labels: Tensor  # int64 [D]
    scale: Tensor  # float32 [3], normalised = byte * scale + offset
    offset: Tensor  # float32 [3]
    values: Tensor  # float32 [3, 256], every byte normalised


def training_bank(images: ImageSet) -> ImageBank:
    """Bank of padded training images [2 D, 40, 3, 40]: all, then all mirrored (9.6 kB an image)."""
    lines = images.train_images.permute(0, 1, 3, 2)
    padded = F.pad(lines, (PADDING, PADDING, 0, 0, PADDING, PADDING))
    both = torch.cat((padded, padded.flip(3)))
    return ImageBank(both, images.train_labels, *_normalisation(images))


def evaluation_bank(images: ImageSet) -> ImageBank:
    """Bank of the test images [V, 32, 3, 32]."""
    lines = images.test_images.permute(0, 1, 3, 2).contiguous()
    return ImageBank(lines, images.test_labels, *_normalisation(images))


def _normalisation(images: ImageSet) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and offset [3] that make (value in [0, 1] - mean) / std of bytes, and that of each."""
    mean = torch.tensor(images.mean, dtype=torch.float64)
    std = torch.tensor(images.std, dtype=torch.float64)
    device = images.train_images.device
    scale = (1 / (255 * std)).float().to(device)
    offset = (-mean / std).float().to(device)
    levels = torch.arange(256.0, device=device)
    return scale, offset, levels.mul(scale[:, None]).add(offset[:, None])


def check_work(images: ImageSet, train_samples: int, val_samples: int) -> None:
    """Raise SettingError where an env-step would need more images than there are."""
    for setting, value, available, kind in (
        ("train_samples", train_samples, len(images.train_images), "training"),
        ("val_samples", val_samples, len(images.test_images), "test"),
    ):
        allowed = f"at most {available}, the {kind} images of {images.name}"
        remedy = f"Lower {setting}, or choose a larger data set with data.name and data.root."
        check(value <= available, setting, value, allowed, remedy)


def check_classes(images: ImageSet, num_classes: int) -> None:
    """Raise SettingError where hosts have too few classes, or not those of own images."""
    setting = "task.num_classes"
    own = images.num_classes
    allowed = f"{own}, the classes of {images.name}"
    check(own in (None, num_classes), setting, num_classes, allowed, f"Give {setting}={own}.")
    found = 1 + max(int(labels.max()) for labels in (images.train_labels, images.test_labels))
    allowed = f"at least {found}, the classes of {images.name}"
    check(num_classes >= found, setting, num_classes, allowed)


class OrderBook:
    """Order in which every env draws training images: permutations of all, pass after pass.

    Holds the permutations of one pass, int32 [n, D], made by sorting, as all envs are in the same
    pass. Those of a run whose envs come to more than HELD elements are never made: they are others,
    of which the places that are drawn can be looked up (`permuted`). Which of both it is
    depends on the sizes of the run alone, and what is drawn then on the keys and the position.
    """

    def __init__(self, keys: Tensor, dataset_size: int, num_envs: int) -> None:
        """keys: int64 [n], stream_keys(seed, DATA_ORDER, (round,), envs). num_envs: of the run."""
        self.keys = keys
        self.dataset_size = dataset_size
        self.held = num_envs * dataset_size <= HELD
        self.pass_number = -1
        self.order = torch.empty(0)

    def draw(self, start: int, count: int) -> Tensor:
        """Training images int64 [n, count] of an env that drew `start` before; may span passes."""
        parts = []
        position = start
        end = start + count
        while position < end:
            pass_number, first = divmod(position, self.dataset_size)
            last = min(self.dataset_size, first + end - position)
            parts.append(self._columns(pass_number, slice(first, last)))
            position += last - first
        return torch.cat(parts, dim=1).long()

    def _columns(self, pass_number: int, columns: slice) -> Tensor:
        if self.held:
            if pass_number != self.pass_number:
                self.order = shuffled(fold(self.keys, pass_number), self.dataset_size)
                self.pass_number = pass_number
            return self.order[:, columns]
        keys = fold(self.keys, pass_number)
        places = torch.arange(columns.start, columns.stop, device=self.keys.device)
        parts = keys.split(max(1, SORT_ELEMENTS // len(places)))
        return torch.cat([permuted(part, places, self.dataset_size).int() for part in parts])


def shuffled(keys: Tensor, size: int) -> Tensor:
    """One random permutation of 0 to size - 1 per key: int32 [n, size], by sorting hashes."""
    members = torch.arange(size, device=keys.device)
    parts = keys.split(max(1, SORT_ELEMENTS // size))
    return torch.cat(
        [fold(part[:, None], members).argsort(dim=1, stable=True).int() for part in parts]
    )


def permuted(keys: Tensor, places: Tensor, size: int) -> Tensor:
    """Members int64 [n, m] at `places` (int64 [m], below `size`) of a permutation per key [n].

    Both coordinates of the grid are moved in turn by what the other and the key say (Luby and
    Rackoff 1988); who ends on one of the spare places is moved on until it does not (Black and
    Rogaway 2002). As no more can be in a row than there are, that is a fixed amount of work, which
    no host has to ask about.
    """
    rows, columns = grid(size)
    round_keys = [fold(keys, number)[:, None] for number in range(ROUNDS)]
    found = _moved(places.expand(keys.shape[0], -1), round_keys, rows, columns)
    for _ in range(rows * columns - size):
        found = torch.where(found < size, found, _moved(found, round_keys, rows, columns))
    return found


@lru_cache(maxsize=64)
def grid(size: int) -> tuple[int, int]:
    """(rows, columns) with fewest places to spare near a square, of those the nearest to one."""
    least = min(2, size // 2 + 1)  # with a single row nobody changes the order
    shapes = [
        (rows, -(-size // rows))
        for rows in range(max(least, isqrt(size) // 2), max(least, isqrt(size)) + 1)
    ]
    return min(shapes, key=lambda shape: (shape[0] * shape[1], -shape[0]))


def _moved(place: Tensor, round_keys: list[Tensor], rows: int, columns: int) -> Tensor:
    """Where the network takes the places [n, m] of the grid: a permutation of all of them."""
    row = place // columns
    column = place % columns
    for number, key in enumerate(round_keys):
        if number % 2:
            column = (column + integers(key, row, columns)) % columns
        else:
            row = (row + integers(key, column, rows)) % rows
    return row * columns + column


def validation_order(
    num_test: int, val_samples: int, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Test images int64 [V] that every env is measured on: the first of a fixed shuffle by seed."""
    key = stream_keys(seed, VALIDATION_SET, (), torch.zeros(1, dtype=torch.int64, device=device))
    return shuffled(key, num_test)[0, :val_samples].long()


class Split(NamedTuple):
    """Shares of N envs when one pass over the data is divided among them (data.split=true)."""

    num_envs: int
    batch_size: int  # B, of one env
    num_batches: int  # training batches per env and env-step
    train_samples: int  # T = B * num_batches
    val_samples: int  # columns of split_validation_order


def split_sizes(images: ImageSet, batch_size: int, num_envs: int, accumulate: int = 1) -> Split:
    """Shares by the reference's rule: T = B * floor(D / (B N)).

    SettingError where an env has no images of its own, or no whole optimiser steps.
    """
    num_train = len(images.train_images)
    num_test = len(images.test_images)
    together = batch_size * num_envs
    allowed = (
        f"at most {num_train // batch_size} with data.split=true, so that the {num_train} training "
        f"images of {images.name} give every env a batch of {batch_size}"
    )
    remedy = "Lower envs or batch_size, or set data.split=false."
    check(num_train >= together, "envs", num_envs, allowed, remedy)
    num_batches = num_train // together
    allowed = f"a divisor of {num_batches}, the batches per env-step with data.split=true"
    check(num_batches % accumulate == 0, "accumulate", accumulate, allowed)
    reason = f"so that the test images of {images.name} give every env one"
    allowed = f"at most {num_test} with data.split=true, {reason}"
    check(num_test >= num_envs, "envs", num_envs, allowed, "Lower envs, or set data.split=false.")
    whole, rest = divmod(num_test, together)
    tested = whole * batch_size + -(-rest // num_envs)
    return Split(num_envs, batch_size, num_batches, batch_size * num_batches, tested)


def split_training_order(key: Tensor, dataset_size: int, pass_number: int, split: Split) -> Tensor:
    """Training images int64 [N, T] of one env-step: one shuffled pass, of whose every B*N images
    env i takes chunk i.

    key: int64 [1], shared by all envs; an env-step is one pass, the rest of the images is dropped.
    """
    order = shuffled(fold(key, pass_number), dataset_size)[0].long()
    used = order[: split.num_envs * split.train_samples]
    return used.view(split.num_batches, split.num_envs, split.batch_size).transpose(0, 1).flatten(1)


def split_validation_order(
    num_test: int, split: Split, device: torch.device | str = "cpu"
) -> Tensor:
    """Test images int64 [N, val_samples]: every env has its own fixed ones, -1 where it has one
    less than others.

    Every B*N images in their order are cut into N chunks as torch.tensor_split does.
    """
    together = split.batch_size * split.num_envs
    whole, rest = divmod(num_test, together)
    envs = torch.arange(split.num_envs, device=device)[:, None]
    shape = whole, split.num_envs, split.batch_size
    order = torch.arange(whole * together, device=device).view(shape)
    size, longer = divmod(rest, split.num_envs)
    column = torch.arange(split.val_samples - whole * split.batch_size, device=device)
    place = whole * together + envs * size + envs.clamp(max=longer) + column
    last = torch.where(column < size + (envs < longer).long(), place, -1)
    return torch.cat((order.transpose(0, 1).flatten(1), last), dim=1)


def cut_batch(crops: ImageCrops, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Normalised images [B, n*3, 32, 32] (channels_last; env, then colour), labels int64 [B, n]."""
    bank = crops.bank
    first = crops.first.T
    batch_size, num_envs = first.shape
    _, line, colour, _ = bank.lines.stride()
    lines = torch.arange(0, IMAGE_SIZE * line, line, device=first.device)[:, None, None]
    colours = torch.arange(0, IMAGE_CHANNELS * colour, colour, device=first.device)
    starts = first[:, None, :, None] + lines + colours
    every_start = bank.lines.as_strided((bank.lines.numel() - IMAGE_SIZE + 1, IMAGE_SIZE), (1, 1))
    cut = every_start.index_select(0, starts.flatten())
    channels = num_envs * IMAGE_CHANNELS
    by_pixel = cut.view(batch_size, IMAGE_SIZE, channels, IMAGE_SIZE).transpose(2, 3).contiguous()
    exact = torch.promote_types(dtype, torch.float32)
    repeats = IMAGE_SIZE * num_envs
    scale, offset = (one.to(exact).repeat(repeats) for one in (bank.scale, bank.offset))
    normalised = by_pixel.to(exact).flatten(2).mul_(scale).add_(offset).to(dtype)
    images = normalised.view(batch_size, IMAGE_SIZE, IMAGE_SIZE, channels).permute(0, 3, 1, 2)
    return images, crops.labels.T


def training_crops(
    bank: ImageBank, indices: Tensor, keys: Tensor, start: int | Tensor, augment: bool
) -> ImageCrops:
    """Training images that are still to be cut.

    bank: training_bank. indices: int64 [n, B], images per env. keys: int64 [n], stream_keys(seed,
    AUGMENTATION, (round,), envs). start: samples that each env has drawn before. augment: take a
    random one of the crops of the image with PADDING black pixels around it, mirrored in half of
    the cases; otherwise the image as it is.
    """
    if augment:
        samples = start + torch.arange(indices.shape[1], device=indices.device)
        crop = integers(keys[:, None], samples, NUM_CROPS)
    else:
        crop = torch.full_like(indices, NUM_CROPS // 2 // 2)
    left = crop % NUM_SHIFTS
    top = crop // NUM_SHIFTS % NUM_SHIFTS
    image = indices + crop // NUM_SHIFTS**2 * len(bank.labels)  # the mirrored stand behind all
    return ImageCrops(bank, image * PADDED_BYTES + top * LINE + left, bank.labels[indices])


def evaluation_crops(bank: ImageBank, indices: Tensor) -> ImageCrops:
    """Test images that are still to be cut; index -1 has label -1.

    bank: evaluation_bank. indices: int64 [n, b], images per env; n = 1 where all envs share them.
    """
    valid = indices.clamp(min=0)
    labels = torch.where(indices < 0, -1, bank.labels[valid])
    return ImageCrops(bank, valid * bank.lines.stride(0), labels)


class EnvStepBatches(NamedTuple):
    """Training batches of one env-step, by the number of the batch."""

    bank: ImageBank  # training_bank
    order: Tensor  # int64 [N, T], images of this env-step
    keys: Tensor  # int64 [N], streams of augmentation
    start: int  # samples that each env has drawn before this env-step
    batch_size: int
    augment: bool
    dtype: torch.dtype

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Images [B, n*3, 32, 32] (channels_last), labels [B, n] of batch `index` for envs [n]."""
        return cut_batch(self.crops(envs, index), self.dtype)

    def crops(self, envs: Tensor, index: int) -> ImageCrops:
        """The images of `batch`, uncut [n, B]."""
        first = index * self.batch_size
        indices = self.order[:, first : first + self.batch_size][envs]
        return training_crops(self.bank, indices, self.keys[envs], self.start + first, self.augment)


class ValidationImages(NamedTuple):
    """Validation batches: the same images for all envs, or own ones for each."""

    bank: ImageBank  # evaluation_bank
    order: Tensor  # int64 [V] shared, or [N, V] with -1 for nothing
    dtype: torch.dtype

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """Images [b, 3 or n*3, 32, 32] (channels_last), labels [b, 1 or n], at most `size` each."""
        parts = (evaluation_crops(self.bank, part) for part in self._order(envs).split(size, dim=1))
        return [cut_batch(part, self.dtype) for part in parts]

    def crops(self, envs: Tensor) -> ImageCrops:
        """The images of all `batches`, uncut [1 or n, V]."""
        return evaluation_crops(self.bank, self._order(envs))

    def _order(self, envs: Tensor) -> Tensor:
        return self.order[None] if self.order.ndim == 1 else self.order[envs]
