"""Files of own images as users have them, made here: noise whose brightness tells the class."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

COUNTS = {"train": 48, "test": 24, "val": 16}


def part(name: str, shape: tuple[int, ...], classes: int, count: int = 0) -> dict[str, np.ndarray]:
    """Images uint8 [count, *shape] and labels uint8 [count, 1] of all classes in turn, as MedMNIST
    has them.
    """
    count = count or COUNTS[name]
    labels = np.arange(count) % classes
    noise = np.random.default_rng(len(name)).integers(0, 100, (count, *shape))
    images = noise + (labels * (155 // classes)).reshape(-1, *(1,) * len(shape))
    return {
        f"{name}_images": images.astype(np.uint8),
        f"{name}_labels": labels.astype(np.uint8)[:, None],
    }


def arrays(
    shape: tuple[int, ...] = (28, 28), classes: int = 3, val: bool = False
) -> dict[str, np.ndarray]:
    """The content of a file."""
    names = ("train", "val", "test") if val else ("train", "test")
    return {key: array for name in names for key, array in part(name, shape, classes).items()}


def write(path: Path, content: dict[str, np.ndarray] | None = None, **changed: np.ndarray) -> Path:
    """An .npz of `content`, or of `arrays()`, with some arrays `changed`."""
    np.savez(path, **((arrays() if content is None else content) | changed))
    return path


class Command:
    """Pickles to a call of os.system that would make the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


CLASSES = ("Birne", "Äpfel", "橙子")  # in the order of their letters' numbers


def kinds(levels: np.ndarray) -> dict[str, Image.Image]:
    """Pictures by the name of a file, grey and coloured, of 8 and 16 bits, of `levels` [H, W]."""
    grey = Image.fromarray(levels)
    wide = Image.fromarray(levels.astype(np.uint16) * 257)
    return {
        "grey.png": grey,
        "größe.jpg": grey.convert("RGB"),
        "palette.png": grey.convert("RGB").convert("P"),
        "clear.png": Image.merge("RGBA", [grey, grey, grey, Image.new("L", grey.size, 255)]),
        "wide.png": wide,
        "wide.tiff": wide,
    }


def folder(path: Path, each: int = 12, sides: tuple[int, ...] = (20, 32, 50)) -> Path:
    """A folder of CLASSES with `each` images, of all `kinds` and `sides` in turn: noise whose
    brightness tells the class.
    """
    generator = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (path / name).mkdir(parents=True)
        for number in range(each):
            side = sides[number % len(sides)]
            levels = 80 * label + generator.integers(0, 60, (side, side + 4))
            pictures = kinds(levels.astype(np.uint8))
            chosen = list(pictures)[number % len(pictures)]
            pictures[chosen].save(path / name / f"{number}_{chosen}")
    return path
