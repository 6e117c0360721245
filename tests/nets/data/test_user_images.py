"""What `check_images` finds in images that can be used but spoil results, and that it is silent
about good ones.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import esper_soa
from esper_soa.config.nets import DataConfig
from esper_soa.nets.data.datasets import load_images
from tests.builders import user_files

GOOD = user_files.arrays()
TRAIN, TRAIN_LABELS, TEST, TEST_LABELS = GOOD.values()


FIRST = "0, 1, 2, 3, 4, 5, 6, 7"
COMMON_CLASS = (
    "83% of the test images are of class 2: who always answers so is as often right, "
    "and accuracy says little."
)


def findings(classes: int = 3, names: tuple[str, ...] = (), **changed: np.ndarray) -> list[str]:
    content = user_files.arrays(classes=classes) | changed
    return esper_soa.check_images(esper_soa.images(*content.values(), class_names=list(names)))


def put(array: np.ndarray, places: object, values: object) -> np.ndarray:
    """The array with other values at these places."""
    changed = array.copy()
    changed[places] = values
    return changed


def coloured(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, axis=3)


def test_good_sets_have_no_findings(tmp_path: Path) -> None:
    for name in ("fashion32", "synthetic"):
        assert esper_soa.check_images(load_images(DataConfig(name=name), "cpu")) == []
    assert esper_soa.check_images(user_files.write(tmp_path / "m.npz")) == []
    assert findings() == []


def test_classes_of_sets_that_do_not_tell_how_many_are_those_of_both_parts() -> None:
    plain = load_images(DataConfig("synthetic"), "cpu")
    for part, told in (("train", "test"), ("test", "training")):
        more = replace(plain, **{f"{part}_labels": vars(plain)[f"{part}_labels"] + 1})
        assert f"Class 10 has no {told} image." in esper_soa.check_images(more)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"names": ("cat", "dog", "eel", "f\nx")},
            ["Class 3 (f\\nx) has no training image.", "Class 3 (f\\nx) has no test image."],
        ),
        (
            {"test_labels": put(TEST_LABELS, slice(2), [[3], [5]])},
            ["Classes 3, 4, 5 have no training image.", "Class 4 has no test image."],
        ),
        ({"train_labels": TRAIN_LABELS[::-1]}, []),
        ({"test_labels": 1 + np.arange(24) % 2}, ["Class 0 has no test image."]),
        (
            {"classes": 12},
            [f"Classes {FIRST} and 4 more have fewer than 10 training images."],
        ),
        ({"classes": 8}, [f"Classes {FIRST} have fewer than 10 training images."]),
        ({"test_labels": put(TEST_LABELS, slice(18), 2)}, [COMMON_CLASS]),
        # as another one but for the last line
        ({"train_images": put(TRAIN, 5, put(TRAIN[6], -1, 7))}, []),
        # of class 1 just as many as are not few
        ({"train_labels": put(0 * TRAIN_LABELS, slice(10), 1), "test_labels": TEST_LABELS % 2}, []),
        # 17 of 24, of two classes
        ({"classes": 2, "test_labels": put(np.ones(24, int), slice(7), 0)}, []),
        (
            {"test_images": put(TEST, 3, TRAIN[40])},
            ["1 of 24 test images are training images too: accuracy will be flattered."],
        ),
        (  # labels 0, 1 beside 0, and 2 beside 2
            {"train_images": put(TRAIN, slice(9, 12), TRAIN[[6, 6, 8]])},
            [
                "3 of 48 training images repeat another one.",
                "1 training images are there before under another label.",
            ],
        ),
        (
            {
                "train_images": put(put(TRAIN[..., 4:], 5, 0), 6, 200),
                "test_images": put(TEST[..., 4:], 7, 255),
            },
            [
                "2 of 48 training images are of one colour: is something missing?",
                "1 of 24 test images are of one colour: is something missing?",
            ],
        ),
        (  # but for the last line, or the last pixel of each
            {
                "train_images": put(
                    put(put(TRAIN, [5, 6], 200), np.s_[5, -1], 7), np.s_[6, :, -1], 7
                )
            },
            [],
        ),
        (  # of one colour where test images are not black, but not elsewhere
            {
                "train_images": put(TRAIN, np.s_[5, 4:24, 4:24], 200),
                "test_images": np.pad(TEST[:, 4:24, 4:24], ((0, 0), (4, 4), (4, 4))),
            },
            [],
        ),
        (  # one of its channels is the same everywhere
            {
                "train_images": put(coloured(TRAIN), np.s_[5, ..., 0], 7),
                "test_images": coloured(TEST),
            },
            [],
        ),
    ],
)
def test_what_spoils_results_is_told(changed: dict, told: list[str]) -> None:
    assert findings(**changed) == told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"train_labels": TRAIN_LABELS + 1, "test_labels": TEST_LABELS + 1},
            "Class 0 has no image: do labels count from 1? They must count from 0.",
        ),
        (
            {"train_labels": put(np.zeros(48, int), slice(9), 1), "test_labels": TEST_LABELS % 2},
            "Class 1 has fewer than 10 training images.",
        ),
        (
            {"train_images": TRAIN // 18, "test_images": TEST // 18},
            "The brightest value of the training images is 11 of 255: were values from 0 to 1, or "
            "class numbers, stored as bytes?",
        ),
        (
            {"test_images": TEST // 4 + 190},
            "Training images have a mean brightness of 0.30, test images of 0.64: were both "
            "prepared in one way?",
        ),
        (
            {
                "train_images": coloured(TRAIN),
                "test_images": put(coloured(TEST), np.s_[..., 1:], 255),
            },
            "Training images have a mean brightness of 0.30, test images of 0.61: were both "
            "prepared in one way?",
        ),
    ],
)
def test_labels_from_1_rare_classes_and_brightness_are_noticed(changed: dict, told: str) -> None:
    assert told in findings(**changed)


@pytest.mark.parametrize(("deviations", "found"), [(0.9, False), (1.1, True)])
def test_the_mean_of_test_images_is_within_a_deviation(deviations: float, found: bool) -> None:
    shown = np.pad(TRAIN, ((0, 0), (2, 2), (2, 2)))
    level = (shown.mean() + deviations * shown.std()) / 28**2 * 32**2
    told = findings(test_images=np.full_like(TEST, round(level)))
    assert any(one.endswith("were both prepared in one way?") for one in told) == found


@pytest.mark.parametrize(("brightest", "found"), [(15, True), (16, False)])
def test_images_are_dark_up_to_a_brightest_value_of_15(brightest: int, found: bool) -> None:
    images = {"train_images": TRAIN, "test_images": TEST}
    changed = {name: np.minimum(part, brightest) for name, part in images.items()}
    told = f"The brightest value of the training images is {brightest} of 255: "
    assert any(one.startswith(told) for one in findings(**changed)) == found


def test_a_share_of_common_images_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper_soa.nets.data.user_images.MAX_COMMON", 1 / 24)
    assert findings(test_images=put(TEST, 3, TRAIN[40])) == []
