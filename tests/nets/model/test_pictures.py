"""Pictures of Pillow, arrays and files become levels, and images as networks take them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from esper_soa.nets.model import pictures
from tests.builders import user_files

LEVELS = np.random.default_rng(3).integers(0, 256, (5, 7)).astype(np.uint8)
COLOURS = np.random.default_rng(4).integers(0, 256, (5, 7, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "channels", "most"),
    [
        ("grey.png", 1, 0),
        ("größe.jpg", 3, 60),  # as its packing loses some of the noise
        ("palette.png", 3, 51),  # of six levels a channel
        ("clear.png", 3, 0),
        ("wide.png", 1, 0),
        ("wide.tiff", 1, 0),
    ],
)
def test_files_of_every_kind_have_their_levels(
    tmp_path: Path, name: str, channels: int, most: int
) -> None:
    user_files.kinds(LEVELS)[name].save(tmp_path / name)
    found = pictures.levels_of_file(tmp_path / name)
    assert (found.dtype, found.shape) == (torch.uint8, (5, 7, channels))
    assert np.abs(found.numpy().astype(int) - LEVELS[..., None]).max() <= most


def test_what_is_transparent_is_black_and_half_of_it_half_as_bright() -> None:
    clear = np.array([[[200, 100, 50, 0], [200, 100, 50, 128]]], np.uint8)
    found = pictures.levels_of_picture(Image.fromarray(clear))
    assert found.tolist() == [[[0, 0, 0], [100, 50, 25]]]


def test_a_picture_that_was_taken_sideways_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right is due
    Image.fromarray(LEVELS).save(tmp_path / "a.png", exif=exif)
    found = pictures.levels_of_file(tmp_path / "a.png")
    assert np.array_equal(found[..., 0].numpy(), np.rot90(LEVELS, -1))


def test_large_pictures_are_averaged_down_by_a_whole_factor() -> None:
    wide = np.repeat(np.array([[0, 100, 200, 40]], np.uint8), 600, axis=1)  # 2400 pixels
    found = pictures.levels_of_picture(Image.fromarray(wide))
    assert found.shape == (1, 800, 1)
    assert found[0, [0, 250, 500, 799], 0].tolist() == [0, 100, 200, 40]


def test_numbers_that_are_no_levels_are_refused() -> None:
    with pytest.raises(pictures.NoLevelsError, match="mode F"):
        pictures.levels_of_picture(Image.fromarray(LEVELS.astype(np.float32)))


def test_grey_is_repeated_and_colours_are_weighed_as_pillow_does() -> None:
    grey = torch.from_numpy(LEVELS)[..., None]
    assert torch.equal(pictures.as_channels(grey, 3), grey.expand(-1, -1, 3))
    found = pictures.as_channels(torch.from_numpy(COLOURS), 1)[..., 0].numpy().astype(int)
    assert np.abs(found - np.asarray(Image.fromarray(COLOURS).convert("L"))).max() <= 1


@pytest.mark.parametrize("rule", ["auto", "pad", "scale", "stretch"])
def test_arrays_pictures_and_files_become_the_same_tensor(tmp_path: Path, rule: str) -> None:
    inputs = {"shape": [3, 32, 32], "channels": "RGB", "resize": rule}
    picture = Image.fromarray(COLOURS)
    picture.save(tmp_path / "a.png")
    found = pictures.preprocess(inputs, tmp_path / "a.png")
    assert (found.dtype, found.shape) == (torch.float32, (1, 3, 32, 32))
    for image in (picture, COLOURS, COLOURS / 255, torch.from_numpy(COLOURS)):
        assert torch.equal(pictures.preprocess(inputs, image), found)
    if rule == "pad":  # rows 13 to 17, columns 12 to 18
        inner = (found[0, :, 13:18, 12:19] * 255).round().byte()
        assert np.array_equal(inner.permute(1, 2, 0).numpy(), COLOURS)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((2, 4, 4, 3), np.uint8), r"shape \[2, 4, 4, 3\]"),
        (np.zeros((4, 4), np.int64), "int64"),
        (np.full((4, 4), 2.0), "floats from 0 to 1"),
        (np.zeros((40, 40), np.uint8), "40x40 pixels is too large for 32x32"),
    ],
)
def test_arrays_that_are_no_image_are_refused(image: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pictures.preprocess({"shape": [3, 32, 32], "channels": "RGB", "resize": "pad"}, image)


def test_networks_that_take_no_images_preprocess_none() -> None:
    with pytest.raises(ValueError, match="takes no images"):
        pictures.preprocess({"shape": [64], "name": "tokens"}, LEVELS)
