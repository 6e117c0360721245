"""The image sets: CIFAR-10 from files, the embedded fashion32, a synthetic one, own images; each
whole on the device.

Given the DataConfig, `load_images` returns an ImageSet that says what it is and why it was taken.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.errors import SettingError, one_line
from esper_soa.nets.cifar import read_cifar10
from esper_soa.nets.config import NPZ, PREPARATION, DataConfig
from esper_soa.nets.image_preparation import OwnImages, Preparation, Statistics, count_npz, read_npz
from esper_soa.nets.streams import fold, uniform

FASHION32_FILE = Path(__file__).parent / "assets" / "fashion32.npz"

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
FASHION32_MEAN = (0.2199,) * 3  # of its training images with their border of 2 black pixels
FASHION32_STD = (0.3326,) * 3

SYNTHETIC_SEED = 20
SYNTHETIC_CONTRAST = 0.5  # largest distance of a class pattern from mid-grey, as a share of white
SYNTHETIC_NOISE = 0.25  # largest distance of a pixel from its class pattern, as a share of white


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


class ImageCount(NamedTuple):
    """How many images there are."""

    train: int
    test: int


def count_images(cfg: DataConfig) -> ImageCount:
    """How many images a file of own images holds; 0 of the other sets, whose known size fits."""
    read = cfg.own and cfg.root
    return ImageCount(*count_npz("data.root", cfg.root, cfg.val)) if read else ImageCount(0, 0)


def load_images(cfg: DataConfig, device: torch.device | str) -> ImageSet:
    """The image set that the settings ask for.

    data.name=auto takes what data.root is, and then an unusable root is an error; with an empty
    root it takes fashion32. Raises SettingError or DataError.
    """
    if not cfg.root and cfg.name in ("cifar10", "npz"):
        wanted = "a file like mine.npz" if cfg.own else "the folder or archive of CIFAR-10"
        raise SettingError("data.root", "''", f"{wanted} when data.name={cfg.name}")
    if cfg.name == "given":
        remedy = f"A program handed the images over: save them as an {NPZ} for use without it."
        raise SettingError("data.name", cfg.name, "npz, or another set that can be read", remedy)
    reason = "asked for by data.name"
    if cfg.name == "auto":
        state = "empty" if not cfg.root else f"an {NPZ}" if cfg.own else "set"
        reason = f"data.name=auto takes it as data.root is {state}"
    if cfg.own:
        choices = {setting: vars(cfg)[setting] for setting in PREPARATION}
        return own_file("data.root", cfg.root, Preparation(**choices, path="data."), reason, device)
    if cfg.root:
        return cifar10(cfg.root, reason, device)
    if cfg.name == "synthetic":
        return synthetic(cfg.synthetic_train, cfg.synthetic_test, device)
    return fashion32(reason, device)


def cifar10(root: str, reason: str, device: torch.device | str) -> ImageSet:
    """CIFAR-10 from official files under `root` (see read_cifar10)."""
    *arrays, place = read_cifar10(root)
    text = f"CIFAR-10 from {place} ({reason})"
    return _image_set("cifar10", arrays, (CIFAR10_MEAN, CIFAR10_STD), text, device)


def own_file(
    setting: str, root: str, chosen: Preparation, reason: str, device: torch.device | str
) -> ImageSet:
    """Own images from the .npz file `root` (see read_npz), taken for the `reason`."""
    found, sha256 = read_npz(setting, root, chosen)
    text = f"own images from {one_line(root)} (sha256 {sha256[:12]}..., {reason})"
    return own_set(one_line(Path(root).stem), found, text, device)._replace(file_sha256=sha256)


def own_set(name: str, found: OwnImages, text: str, device: torch.device | str) -> ImageSet:
    """Own images; mean, deviation and the number of classes are part of what they are."""
    statistics = found.mean, found.std
    further = repr((statistics, found.num_classes)).encode()
    images = _image_set(name, found[:4], statistics, text, device, further)
    return images._replace(
        num_classes=found.num_classes, class_names=found.class_names, notes=found.notes
    )


def fashion32(reason: str, device: torch.device | str) -> ImageSet:
    """The embedded subset of Fashion-MNIST: 28x28 grey, zero padded to 32x32, in all channels."""
    arrays = []
    with np.load(FASHION32_FILE, allow_pickle=False) as file:
        for part in ("train", "test"):
            grey = np.pad(file[f"{part}_images"], ((0, 0), (2, 2), (2, 2)))
            arrays.append(np.repeat(grey[..., None], 3, axis=3))
            arrays.append(file[f"{part}_labels"].astype(np.int64))
    text = f"fashion32, the embedded subset of Fashion-MNIST ({reason})"
    return _image_set("fashion32", arrays, (FASHION32_MEAN, FASHION32_STD), text, device)


def synthetic(num_train: int, num_test: int, device: torch.device | str) -> ImageSet:
    """Ten patterns of 4x4 coloured squares, one per class, under noise; the same for every run."""
    keys = fold(torch.tensor(SYNTHETIC_SEED), torch.arange(3))
    colours = uniform(keys[0], torch.arange(10 * 4 * 4 * 3)).view(10, 4, 4, 3) * 2 - 1
    patterns = 0.5 + SYNTHETIC_CONTRAST * colours.repeat_interleave(8, 1).repeat_interleave(8, 2)
    arrays = (*_noisy(patterns, keys[1], num_train), *_noisy(patterns, keys[2], num_test))
    values = arrays[0].reshape(-1, 3) / 255.0
    statistics = (_triple(values.mean(0)), _triple(values.std(0)))
    text = "synthetic images, asked for by data.name"
    return _image_set("synthetic", arrays, statistics, text, device)


def _noisy(patterns: Tensor, key: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` images uint8 [count, 32, 32, 3] of classes 0 to 9 in turn, and their labels."""
    labels = torch.arange(count) % len(patterns)
    noise = uniform(key, torch.arange(count * 32 * 32 * 3)).view(count, 32, 32, 3) * 2 - 1
    images = (patterns[labels] + SYNTHETIC_NOISE * noise).clamp(0, 1) * 255
    return images.round().to(torch.uint8).numpy(), labels.numpy()


def _triple(values: np.ndarray) -> Statistics:
    red, green, blue = values.tolist()
    return red, green, blue


def _image_set(
    name: str,
    arrays: Sequence[np.ndarray],
    statistics: tuple[Statistics, Statistics],
    text: str,
    device: torch.device | str,
    further: bytes = b"",
) -> ImageSet:
    """Arrays (training images, labels, test images, labels) on the device; their identity is of
    them and `further`.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    digest.update(further)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    source = f"{text}: {len(arrays[0])} training and {len(arrays[2])} test images."
    return ImageSet(name, *tensors, *statistics, digest.hexdigest(), source)  # type: ignore[arg-type]
