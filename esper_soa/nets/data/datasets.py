"""The data sets: CIFAR-10, the embedded fashion32, synthetic ones, images and classes of users."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np
import torch

from esper_soa.config.nets import FOLDER, NPZ, DataConfig, TaskConfig
from esper_soa.config.ranges import AUTO, env_words
from esper_soa.config.registry import DATASET, find, is_reference
from esper_soa.nets.data.batches import BatchSource, SampleCount, SampleSpec
from esper_soa.nets.data.image_set import ImageSet, Part, image_set, join_sets, set_aside
from esper_soa.nets.data.images import image_spec
from esper_soa.nets.data.text import load_text, text_spec
from esper_soa.system.errors import SettingError
from esper_soa.system.streams import fold, uniform

# The readers of files, imported where one is asked for.
CIFAR_READER = "esper_soa.nets.data.cifar"
NPZ_READER = "esper_soa.nets.data.image_preparation"
FOLDER_READER = "esper_soa.nets.data.folder"
FASHION32_FILE = Path(__file__).parent / "assets" / "fashion32.npz"

ROOTS = {
    "cifar10": "the folder or archive of CIFAR-10",
    "npz": "a file like mine.npz",
    FOLDER: "a folder that holds a folder for each class",
}

CIFAR10_IMAGES = 60_000  # of all official batches
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
FASHION32_MEAN = (0.2199,) * 3  # of its training images with their border of 2 black pixels
FASHION32_STD = (0.3326,) * 3

SYNTHETIC_SEED = 20
SUBSET_WORDS = "a subset"  # begins the sentence on a set that is not whole
SYNTHETIC_CONTRAST = 0.5  # largest distance of a class pattern from mid-grey, as a share of white
SYNTHETIC_NOISE = 0.25  # largest distance of a pixel from its class pattern, as a share of white


def sample_spec(cfg: DataConfig) -> SampleSpec:
    """The kind of samples that the settings ask for; SettingError where they name none."""
    if cfg.is_text:
        return text_spec(cfg.context)
    if not is_reference(cfg.name):
        return image_spec(cfg.size, cfg.channels)
    spec = vars(find(DATASET, cfg.name, "data.name")).get("spec")
    if not isinstance(spec, SampleSpec):
        raise SettingError("data.name", cfg.name, "a class with a SampleSpec as spec")
    return spec


def with_classes(task: TaskConfig, data: DataConfig) -> TaskConfig:
    """The task with the most classes of the image sets where it has `auto`."""
    if task.num_classes != AUTO:
        return task
    return replace(task, num_classes=max(map(_count_classes, data.sets)))


def _count_classes(cfg: DataConfig) -> int:
    # those of the package, and CIFAR-10, have 10
    asked = cfg.is_user_file and cfg.root
    return int(import_module(_reader(cfg)).count_classes(cfg)) if asked else 10


def _reader(cfg: DataConfig) -> str:
    return FOLDER_READER if cfg.is_folder else NPZ_READER


def count_samples(cfg: DataConfig) -> SampleCount:
    """Numbers of samples that files of users hold; 0 of the other sets, whose known size fits."""
    files = (data for data in cfg.sets if data.is_user_file and data.root)
    counted = [import_module(_reader(data)).count_images(data) for data in files]
    return SampleCount(*map(sum, zip((0, 0), *counted, strict=True)))


def load_samples(cfg: DataConfig, device: torch.device | str) -> BatchSource:
    """The samples that the settings ask for: images, text, or those of a user's data set."""
    if is_reference(cfg.name):
        return cast(BatchSource, find(DATASET, cfg.name, "data.name")(cfg)).to(device)
    if cfg.is_text:
        return load_text(cfg).to(device)
    loaded = {data.name: load_images(data, device) for data in cfg.sets}
    return join_sets([loaded[name] for name in env_words(cfg.name)])


def load_images(cfg: DataConfig, device: torch.device | str) -> ImageSet:
    """The image set that the settings ask for: data.name=auto takes what data.root is, and then an
    unusable root is an error, without a root fashion32. Raises SettingError or DataError.
    """
    if not cfg.root and cfg.name in ROOTS:
        raise SettingError("data.root", "", f"{ROOTS[cfg.name]} when data.name={cfg.name}")
    if cfg.name == "given":
        allowed = "npz, or another set that can be read"
        remedy = f"A program handed the images over: save them as an {NPZ} for use without it."
        raise SettingError("data.name", cfg.name, allowed, remedy=remedy)
    reason = "asked for by data.name"
    if cfg.name == "auto":
        kind = "of class folders" if cfg.is_folder else f"an {NPZ}" if cfg.is_user_file else "set"
        reason = f"data.name=auto takes it as data.root is {kind if cfg.root else 'empty'}"
    if cfg.is_user_file:
        return cast(ImageSet, import_module(_reader(cfg)).read_images(cfg, reason)).to(device)
    if cfg.root:
        train, test, place = import_module(CIFAR_READER).read_cifar10(cfg.root)
        size = len(train[1]) + len(test[1])
        share = f"{SUBSET_WORDS} ({100 * size / CIFAR10_IMAGES:.2g} %) of "
        text = f"{share if size < CIFAR10_IMAGES else ''}CIFAR-10 from {place} ({reason})"
        parts = (*set_aside(train, cfg), test)
        return image_set("cifar10", parts, (CIFAR10_MEAN, CIFAR10_STD), text=text).to(device)
    if cfg.name == "synthetic":
        num_val = cfg.validation_images or cfg.synthetic_test
        return synthetic(cfg.synthetic_train, num_val, device, test=cfg.synthetic_test)
    return _fashion32(reason, cfg).to(device)


def _fashion32(reason: str, cfg: DataConfig) -> ImageSet:
    parts = []
    with np.load(FASHION32_FILE) as file:
        for part in ("train", "test"):
            grey = np.pad(file[f"{part}_images"], ((0, 0), (2, 2), (2, 2)))
            labels = file[f"{part}_labels"].astype(np.int64)
            parts.append((np.repeat(grey[..., None], 3, axis=3), labels))
    text = f"fashion32, the embedded subset of Fashion-MNIST ({reason})"
    sets = (*set_aside(parts[0], cfg), parts[1])
    return image_set("fashion32", sets, (FASHION32_MEAN, FASHION32_STD), text=text)


def synthetic(train: int, val: int, device: torch.device | str, test: int = 1) -> ImageSet:
    """Ten patterns of 4x4 coloured squares, one per class, under noise; the same for every run."""
    keys = fold(torch.tensor(SYNTHETIC_SEED), torch.arange(4))
    colours = uniform(keys[0], torch.arange(10 * 4 * 4 * 3)).view(10, 4, 4, 3) * 2 - 1
    patterns = 0.5 + SYNTHETIC_CONTRAST * colours.repeat_interleave(8, 1).repeat_interleave(8, 2)
    parts = list[Part]()
    for key, count in zip(keys[1:], (train, val, test), strict=True):
        labels = torch.arange(count) % len(patterns)
        noise = uniform(key, torch.arange(count * 32 * 32 * 3)).view(count, 32, 32, 3) * 2 - 1
        images = (patterns[labels] + SYNTHETIC_NOISE * noise).clamp(0, 1) * 255
        parts.append((images.round().to(torch.uint8).numpy(), labels.numpy()))
    values = parts[0][0].reshape(-1, 3) / 255.0
    statistics = tuple(values.mean(0).tolist()), tuple(values.std(0).tolist())
    text = "synthetic images, asked for by data.name"
    return image_set("synthetic", parts, statistics, text=text).to(device)
