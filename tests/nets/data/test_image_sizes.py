"""Images of any size become 32x32 by the written rules."""

import numpy as np
import pytest
import torch
from PIL import Image

from esper_soa.config.nets import DataConfig
from esper_soa.nets.data.image_preparation import inner_size, resize_text
from esper_soa.nets.model.pictures import fit


def noise(height: int, width: int) -> np.ndarray:
    generator = np.random.default_rng(height * width)
    return generator.integers(1, 256, (3, height, width, 3)).astype(np.uint8)  # no black pixel


def resize_images(images: np.ndarray, inner: tuple[int, int]) -> np.ndarray:
    return fit(torch.from_numpy(images), inner, 32).numpy()


PADDED = "put in the middle of 32x32 black pixels"
LESS = "(bilinear and antialiased)"


@pytest.mark.parametrize(
    ("size", "rule", "inner", "words"),
    [
        ((32, 32), "auto", (32, 32), "32x32 pixels, taken as they are"),
        ((28, 28), "auto", (28, 28), f"28x28 pixels, {PADDED} (x)"),
        ((24, 24), "auto", (24, 24), f"24x24 pixels, {PADDED} (x)"),
        ((31, 20), "auto", (31, 20), f"31x20 pixels, {PADDED} (x)"),
        ((64, 64), "auto", (32, 32), f"64x64 pixels, scaled to 32x32 {LESS} (x)"),
        ((33, 33), "auto", (32, 32), f"33x33 pixels, scaled to 32x32 {LESS} (x)"),
        ((23, 23), "auto", (32, 32), "23x23 pixels, scaled to 32x32 (bilinear) (x)"),
        # 12.8
        ((100, 40), "auto", (32, 13), f"100x40 pixels, scaled to 32x13 {LESS}, {PADDED} (x)"),
        ((40, 100), "scale", (13, 32), f"40x100 pixels, scaled to 13x32 {LESS}, {PADDED} (x)"),
        # half a pixel is one, as is a sixth of one
        ((64, 1), "scale", (32, 1), f"64x1 pixels, scaled to 32x1 {LESS}, {PADDED} (x)"),
        ((1, 200), "scale", (1, 32), f"1x200 pixels, scaled to 1x32 {LESS}, {PADDED} (x)"),
        ((28, 28), "scale", (32, 32), "28x28 pixels, scaled to 32x32 (bilinear) (x)"),
        ((8, 8), "pad", (8, 8), f"8x8 pixels, {PADDED} (x)"),
        ((100, 20), "stretch", (32, 32), f"100x20 pixels, scaled to 32x32 {LESS} (x)"),
        ((1, 1), "stretch", (32, 32), "1x1 pixels, scaled to 32x32 (bilinear) (x)"),
    ],
)
def test_every_rule_gives_its_size_in_the_middle_of_black_and_says_so(
    size: tuple[int, int], rule: str, inner: tuple[int, int], words: str
) -> None:
    cfg = DataConfig("npz", "own.npz", resize=rule)
    assert inner_size(*size, cfg) == inner
    assert resize_text(*size, cfg) == words.replace("(x)", f"(data.resize={rule})")
    images = noise(*size)
    shown = resize_images(images, inner)
    top = (32 - inner[0]) // 2
    left = (32 - inner[1]) // 2
    cut = shown[:, top : top + inner[0], left : left + inner[1]]
    assert shown.shape == (3, 32, 32, 3)
    assert int((shown > 0).sum()) == cut.size
    assert not np.array_equal(cut, images) or size == inner
    if size == inner:
        assert np.array_equal(cut, images)


@pytest.mark.parametrize("size", [(28, 28), (224, 224), (8, 8), (100, 40), (33, 31)])
def test_scaling_is_pillows_to_a_level(size: tuple[int, int]) -> None:
    images = noise(*size)
    pillow = [Image.fromarray(one).resize((32, 32), Image.Resampling.BILINEAR) for one in images]
    found = resize_images(images, (32, 32)).astype(int)
    assert np.abs(found - np.stack([np.asarray(one) for one in pillow])).max() <= 1


def test_a_half_is_rounded_up_as_in_whole_numbers_so_that_bytes_are_the_same_everywhere() -> None:
    images = noise(64, 64)
    # by a factor of 2 a pixel is 1, 3, 3, 1 eighths of four; at the border one of them is missing
    weights = np.zeros((32, 66), np.int64)
    for place in range(32):
        weights[place, 2 * place : 2 * place + 4] = 1, 3, 3, 1
    weights = weights[:, 1:65]
    sums = np.einsum("ih,nhwc,jw->nijc", weights, images.astype(np.int64), weights)
    totals = np.multiply.outer(weights.sum(1), weights.sum(1))[None, :, :, None]
    assert (2 * sums % (2 * totals) == totals).any()  # halves
    wanted = (2 * sums + totals) // (2 * totals)
    assert np.array_equal(resize_images(images, (32, 32)), wanted)
