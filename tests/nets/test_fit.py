"""Images of any size become 32x32 by the written rules, with the same bytes on every machine."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from esper_soa.errors import SettingError
from esper_soa.nets.fit import Fit, fitted, plan_fit, weights


def noise(height: int, width: int, channels: int = 3, count: int = 3) -> np.ndarray:
    return (
        np.random.default_rng(height * width)
        .integers(0, 256, (count, height, width, channels))
        .astype(np.uint8)
    )


def inner(shown: np.ndarray, fit: Fit) -> np.ndarray:
    return shown[:, fit.top : fit.top + fit.inner_height, fit.left : fit.left + fit.inner_width]


def test_images_of_32_pixels_are_taken_as_they_are() -> None:
    images = noise(32, 32)
    for rule in ("auto", "pad", "scale", "stretch"):
        fit = plan_fit(32, 32, rule, "data.resize")
        assert np.array_equal(fitted(images, fit), images)
        assert fit.words == "32x32 pixels, taken as they are"


@pytest.mark.parametrize(
    ("height", "width", "top", "left"), [(28, 28, 2, 2), (24, 24, 4, 4), (31, 20, 0, 6)]
)
def test_auto_puts_images_that_are_a_little_small_on_black_without_changing_them(
    height: int, width: int, top: int, left: int
) -> None:
    images = noise(height, width) | 1  # no black pixel
    fit = plan_fit(height, width, "auto", "data.resize")
    shown = fitted(images, fit)
    assert np.array_equal(shown[:, top : top + height, left : left + width], images)
    assert int((shown > 0).sum()) == images.size
    assert (
        fit.words
        == f"{height}x{width} pixels, put in the middle of 32x32 black pixels (data.resize=auto)"
    )


@pytest.mark.parametrize(
    ("size", "rule", "shown"),
    [
        ((64, 64), "auto", (32, 32)),
        ((23, 23), "auto", (32, 32)),
        ((33, 33), "auto", (32, 32)),
        ((100, 40), "auto", (32, 13)),  # 40 * 32 / 100 = 12.8
        ((40, 100), "scale", (13, 32)),
        ((64, 1), "scale", (32, 1)),  # half a pixel is one
        ((1, 200), "scale", (1, 32)),  # as is a sixth of one
        ((28, 28), "scale", (32, 32)),
        ((28, 14), "pad", (28, 14)),
        ((8, 8), "pad", (8, 8)),
        ((100, 40), "stretch", (32, 32)),
        ((1, 1), "stretch", (32, 32)),
    ],
)
def test_every_rule_gives_its_size(
    size: tuple[int, int], rule: str, shown: tuple[int, int]
) -> None:
    fit = plan_fit(*size, rule, "data.resize")
    assert (fit.inner_height, fit.inner_width) == shown
    assert fitted(noise(*size), fit).shape == (3, 32, 32, 3)
    assert (f"scaled to {shown[0]}x{shown[1]}" in fit.words) == (size != shown)
    assert f"(data.resize={rule})" in fit.words


def test_what_is_said_tells_whether_pixels_were_averaged() -> None:
    assert "(bilinear and antialiased)" in plan_fit(64, 64, "auto", "x").words
    assert "(bilinear)," not in plan_fit(64, 64, "auto", "x").words
    assert "scaled to 32x32 (bilinear) (x=auto)" in plan_fit(8, 8, "auto", "x").words


def test_padding_refuses_what_is_too_large() -> None:
    with pytest.raises(
        SettingError,
        match=r"^data\.resize=pad: must be auto, scale or stretch for images of 33x20 pix",
    ):
        plan_fit(33, 20, "pad", "data.resize")


@pytest.mark.parametrize(
    "size", [(28, 28), (64, 64), (128, 128), (224, 224), (8, 8), (100, 40), (33, 31), (32, 7)]
)
def test_scaling_is_torchs_and_pillows_to_half_a_level(size: tuple[int, int]) -> None:
    images = noise(*size)
    fit = plan_fit(*size, "scale", "resize")
    found = inner(fitted(images, fit), fit)
    wanted = (fit.inner_height, fit.inner_width)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).double()
    exact = (
        F.interpolate(planes, wanted, mode="bilinear", antialias=True).permute(0, 2, 3, 1).numpy()
    )
    assert np.abs(found - exact).max() < 0.52  # half a level, and what 14 bits of a weight lose
    pillow = [
        Image.fromarray(one).resize(wanted[::-1], Image.Resampling.BILINEAR) for one in images
    ]
    assert np.abs(found.astype(int) - np.stack([np.asarray(one) for one in pillow])).max() <= 1


def test_many_images_are_scaled_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images = noise(50, 64, count=7)
    fit = plan_fit(50, 64, "auto", "resize")
    whole = fitted(images, fit)
    assert np.array_equal(whole, np.concatenate([fitted(one[None], fit) for one in images]))
    monkeypatch.setattr("esper_soa.nets.fit.AT_ONCE", 2 * 50 * 64 * 3)  # two at a time
    assert np.array_equal(fitted(images, fit), whole)


@pytest.mark.parametrize(
    ("given", "wanted"), [(224, 32), (28, 32), (33, 32), (5, 1), (1, 32), (1024, 32)]
)
def test_weights_are_whole_numbers_that_add_up(given: int, wanted: int) -> None:
    found = weights(given, wanted)
    assert found.dtype.kind == "i"
    assert found.shape == (wanted, given)
    assert (found.sum(1) == 2**14).all()
    assert (found >= 0).all()
    assert (
        np.array_equal(found, found[::-1, ::-1]) or given % wanted
    )  # left as right, but for what rounding leaves


def test_sums_are_exact_so_that_bytes_are_the_same_everywhere() -> None:
    images = noise(224, 96)
    fit = plan_fit(224, 96, "scale", "resize")
    rows = weights(224, 32)
    columns = weights(96, fit.inner_width)
    sums = np.einsum("ih,nhwc,jw->nijc", rows, images.astype(np.int64), columns)  # in whole numbers
    assert np.array_equal(inner(fitted(images, fit), fit), (sums + 2**27) >> 28)
