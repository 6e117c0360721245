"""The subset of CIFAR-10 that records name is made from the whole by a list of its images."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.make_cifar_subset import LIST, listed, make
from esper_soa.nets.data.cifar import BATCH_TITLES, read_cifar10


def test_listed_images_are_made_from_the_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for number, (name, title) in enumerate(BATCH_TITLES.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 3072)).astype(np.uint8)
        content = {"batch_label": title, "labels": [number, 9, 1, 2], "data": pixels}
        (whole / name).write_bytes(pickle.dumps(content, protocol=2))
    lines = [*listed(whole)][::-2]
    make(str(whole), tmp_path / "part", lines)
    assert [*listed(tmp_path / "part")] == sorted(lines, key=lambda line: line.split()[0])
    (images, labels), _, _ = read_cifar10(str(whole))
    (part, part_labels), _, _ = read_cifar10(str(tmp_path / "part"))
    assert (part == images.reshape(5, 4, 32, 32, 3)[:, [3, 1]].reshape(part.shape)).all()
    assert (part_labels == labels.reshape(5, 4)[:, [3, 1]].ravel()).all()
    with pytest.raises(SystemExit, match="lacks the image"):
        make(str(whole), tmp_path / "none", [f"test_batch {'0' * 64}"])


def test_the_list_has_every_image_once() -> None:
    lines = LIST.read_text(encoding="ascii").split()
    assert (len(lines[::2]), len(set(lines[1::2]))) == (5592, 5592)
