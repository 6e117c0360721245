"""What `check_images` finds in images that can be used but spoil results, and that it is silent
about good ones.
"""

from pathlib import Path

import numpy as np
import own_files
import pytest

import esper_soa
from esper_soa.nets.config import DataConfig
from esper_soa.nets.datasets import ImageSet, load_images


def made(classes: int = 3, class_names: list[str] | None = None, **changed: np.ndarray) -> ImageSet:
    content = own_files.arrays(classes=classes) | changed
    return esper_soa.images(*content.values(), class_names=class_names or [])


@pytest.mark.parametrize("name", ["fashion32", "synthetic"])
def test_sets_of_ours_have_no_findings(name: str) -> None:
    assert esper_soa.check_images(load_images(DataConfig(name=name), "cpu")) == []


def test_a_good_file_has_no_findings(tmp_path: Path) -> None:
    assert esper_soa.check_images(own_files.write(tmp_path / "m.npz")) == []
    assert esper_soa.check_images(made()) == []


def test_classes_without_images_are_named() -> None:
    names = ["cat", "dog", "eel", "fox"]
    assert esper_soa.check_images(made(class_names=names)) == [
        "Class 3 (fox) has no training image.",
        "Class 3 (fox) has no test image.",
    ]
    test_labels = np.arange(24) % 3
    test_labels[:2] = 3, 5
    assert esper_soa.check_images(made(test_labels=test_labels)) == [
        "Classes 3, 4, 5 have no training image.",
        "Class 4 has no test image.",
    ]


def test_labels_that_count_from_1_are_noticed() -> None:
    content = own_files.arrays()
    found = esper_soa.check_images(
        made(train_labels=content["train_labels"] + 1, test_labels=content["test_labels"] + 1)
    )
    assert found[0] == "Class 0 has no image: do labels count from 1? They must count from 0."
    assert esper_soa.check_images(made(train_labels=content["train_labels"][::-1])) == []
    later = made(test_labels=1 + np.arange(24) % 2)
    assert esper_soa.check_images(later) == ["Class 0 has no test image."]


def test_classes_with_few_images_are_named_and_many_are_cut_short() -> None:
    labels = np.zeros(48, int)
    labels[:9] = 1
    assert "Class 1 has fewer than 10 training images." in esper_soa.check_images(
        made(2, train_labels=labels, test_labels=np.arange(24) % 2)
    )
    found = esper_soa.check_images(made(12))
    assert found == [
        "Classes 0, 1, 2, 3, 4, 5, 6, 7 and 4 more have fewer than 10 training images."
    ]


def test_a_constant_answer_that_scores_is_told() -> None:
    labels = np.arange(24) % 3
    labels[:18] = 2
    assert esper_soa.check_images(made(test_labels=labels)) == [
        (
            "83% of the test images are of class 2: who always answers so is as often right, and "
            "accuracy says little."
        )
    ]


def test_images_that_are_trained_on_and_tested_on_are_counted_beyond_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = own_files.arrays()
    test = content["test_images"].copy()
    test[3] = content["train_images"][40]
    (found,) = esper_soa.check_images(made(test_images=test))
    assert found == "1 of 24 test images are training images too: accuracy will be flattered."
    monkeypatch.setattr("esper_soa.nets.user_images.MAX_COMMON", 1 / 24)
    assert esper_soa.check_images(made(test_images=test)) == []


def test_repeated_images_and_those_under_two_labels_are_counted() -> None:
    train = own_files.arrays()["train_images"]
    train[9:12] = train[[6, 6, 8]]  # labels 0, 1 beside 0, and 2 beside 2
    assert esper_soa.check_images(made(train_images=train)) == [
        "3 of 48 training images repeat another one.",
        "1 training images are there before under another label.",
    ]


def test_images_of_one_colour_are_counted_whatever_their_border() -> None:
    content = own_files.arrays()
    content["train_images"][5] = 0
    content["train_images"][6] = 200
    content["test_images"][7] = 255
    assert esper_soa.check_images(made(**content)) == [
        "2 of 48 training images are of one colour: is something missing?",
        "1 of 24 test images are of one colour: is something missing?",
    ]


def test_dark_bytes_and_parts_of_another_brightness_are_noticed() -> None:
    content = own_files.arrays()
    dark = {key: content[key] // 18 for key in ("train_images", "test_images")}
    (found,) = [told for told in esper_soa.check_images(made(**dark)) if "brightest" in told]
    assert found.startswith(
        "The brightest value of the training images is 11 of 255: were values from 0 to 1, "
    )
    bright = content["test_images"] // 4 + 190
    (found,) = esper_soa.check_images(made(test_images=bright))
    assert found.startswith("Training images have a mean brightness of 0.")
    assert found.endswith("were both prepared in one way?")
