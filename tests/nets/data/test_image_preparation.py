"""Own images: MedMNIST's files and arrays become what hosts see; the rest is refused by name."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from esper_soa.config.nets import DataConfig
from esper_soa.nets.data import image_preparation
from esper_soa.nets.data.batches import check_classes
from esper_soa.nets.data.datasets import ImageSet, count_samples, load_images
from esper_soa.system.errors import DataError, SettingError
from tests.builders import user_files


def loaded(path: Path, **settings: object) -> ImageSet:
    return load_images(DataConfig(name="npz", root=str(path), **settings), "cpu")  # type: ignore[arg-type]


def given(**changed: object) -> ImageSet:
    """From arrays of three classes in grey 28x28."""
    names = ("train", "train_labels", "test", "test_labels")
    arguments: dict = dict(zip(names, user_files.arrays().values(), strict=True))
    return esper_soa.images(**(arguments | changed))


@pytest.mark.parametrize(
    ("flag", "classes", "channels"), [("pathmnist", 9, 3), ("breastmnist", 2, 1)]
)
def test_a_set_of_medmnist_loads_as_it_is(
    tmp_path: Path, flag: str, classes: int, channels: int
) -> None:
    content = user_files.arrays((28, 28, 3)[: 2 + channels // 3], classes, val=True)
    path = user_files.write(tmp_path / f"{flag}.npz", content)
    for images, setting in ((loaded(path), "data.resize"), (esper_soa.images(path), "resize")):
        assert (images.name, images.num_classes, images.class_names) == (flag, classes, ())
        assert images.train_images.shape == (48, 32, 32, 3)
        assert images.test_images.shape == (24, 32, 32, 3)
        given_images = content["train_images"].reshape(48, 28, 28, channels)
        wanted = np.broadcast_to(given_images, (48, 28, 28, 3))
        assert np.array_equal(images.train_images[:, 2:30, 2:30].numpy(), wanted)
        assert images.train_labels.tolist() == content["train_labels"][:, 0].tolist()
        assert images.test_labels.dtype == torch.int64
        mean, std = (", ".join(f"{one:.4f}" for one in of) for of in (images.mean, images.std))
        grey = ["grey: the one channel is repeated, as hosts have three"] if channels == 1 else []
        assert [*images.notes] == [
            f"28x28 pixels, put in the middle of 32x32 black pixels ({setting}=auto)",
            *grey,
            f"normalised by mean {mean} and deviation {std} of the training images",
            f"{classes} classes",
        ]


KINDS = (("", "images"), ("_labels", "labels"))


def test_the_part_val_of_a_file_is_the_validation_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = user_files.arrays(val=True)
    path = user_files.write(tmp_path / "m.npz", content)
    images = loaded(path)
    assert np.array_equal(images.val_images[:, 2:30, 2:30, 1].numpy(), content["val_images"])
    assert images.val_labels.tolist() == content["val_labels"][:, 0].tolist()
    assert len(images.train_images) == 48
    monkeypatch.setenv("HOME", str(tmp_path))
    for root in (path, "~/m.npz"):
        assert tuple(count_samples(DataConfig(name="npz", root=str(root)))) == (48, 24 + 16)
        assert esper_soa.images(root).identity == images.identity
    keys = ("train", "test", "val")
    arrays = {f"{key}{end}": content[f"{key}_{kind}"] for key in keys for end, kind in KINDS}
    assert esper_soa.images(**arrays).identity == images.identity
    told = (
        r"^data\.validation_images=9: must be 0 where there are val_images, which are "
        r"the validation part\.$"
    )
    with pytest.raises(SettingError, match=told):
        loaded(path, validation_images=9)


@pytest.mark.parametrize(("asked", "count"), [(0, 9), (20, 20), (47, 47)])
def test_without_a_part_val_training_images_are_set_aside(asked: int, count: int) -> None:
    whole = user_files.arrays()
    images = given(validation_images=asked)
    assert len(images.val_images) == count
    shown = torch.cat((images.train_images, images.val_images))[:, 2:30, 2:30, 0]
    both = [one.tobytes() for one in shown.numpy()]
    assert sorted(both) == sorted(one.tobytes() for one in whole["train_images"])
    labels = torch.cat((images.train_labels, images.val_labels)).tolist()
    known = zip(whole["train_images"], whole["train_labels"].ravel().tolist(), strict=True)
    assert dict(zip(both, labels, strict=True)) == {one.tobytes(): label for one, label in known}
    assert len(images.test_images) == 24
    assert given(validation_images=asked).identity == images.identity


def test_a_set_is_of_the_classes_of_all_parts_and_the_task_must_have_as_many(
    tmp_path: Path,
) -> None:
    content = user_files.arrays(val=True)
    content["val_labels"][3] = 5
    images = loaded(user_files.write(tmp_path / "m.npz", content))
    assert images.num_classes == 6
    check_classes(images, 6)
    for wrong in (5, 10):
        told = (
            rf"^task\.num_classes={wrong}: must be 6, the classes of m\. "
            r"Give task\.num_classes=6, or auto\."
        )
        with pytest.raises(SettingError, match=told):
            check_classes(images, wrong)


def test_arrays_and_tensors_and_a_file_of_the_same_are_one_set(tmp_path: Path) -> None:
    content = user_files.arrays((28, 28, 3))
    one = esper_soa.images(user_files.write(tmp_path / "m.npz", content))
    parts = list(content.values())
    tensors = [torch.from_numpy(array) for array in parts]
    moved = [tensors[0].permute(0, 3, 1, 2), tensors[1], tensors[2].permute(0, 3, 1, 2), tensors[3]]
    floats = [parts[0] / 255, parts[1].astype(int)[:, 0], np.float32(parts[2] / 255), parts[3]]
    several = [esper_soa.images(*given) for given in (parts, tensors, floats)]
    for other in (*several, esper_soa.images(*moved, layout="nchw")):
        assert other.identity == one.identity
        assert torch.equal(other.train_images, one.train_images)
        assert (other.mean, other.std) == (one.mean, one.std)
    assert "float64 and float32 from 0 to 1, rounded to 256 levels" in several[2].notes
    grey = [parts[0][..., 0], parts[1], parts[2][..., 0], parts[3]]
    same = {esper_soa.images(*grey, layout=layout).identity for layout in ("nhwc", "nchw")}
    assert len(same) == 1
    assert (one.name, esper_soa.images(*parts).name) == ("m", "images")
    assert esper_soa.images(*parts, name="mine").name == "mine"
    assert esper_soa.images(tmp_path / "m.npz", name="mine").name == "mine"


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_brightness_from_0_to_1_becomes_the_nearest_byte_and_is_told(kind: type) -> None:
    levels = np.linspace(0, 1, 28 * 28).astype(kind)
    images = given(
        test=np.broadcast_to(levels.reshape(1, 28, 28), (24, 28, 28)),
        train=np.stack([levels] * 48).reshape(48, 28, 28),
    )
    wanted = np.floor(levels.astype(np.float64) * 255 + 0.5).reshape(28, 28)
    assert np.array_equal(images.train_images[0, 2:30, 2:30, 2].numpy(), wanted)
    assert f"{np.dtype(kind).name} from 0 to 1, rounded to 256 levels" in images.notes
    mixed = given(test=np.stack([levels] * 24).reshape(24, 28, 28))
    assert f"{np.dtype(kind).name} from 0 to 1, rounded to 256 levels" in mixed.notes


def test_tensors_on_their_way_through_a_network_may_be_given() -> None:
    image = torch.nn.Parameter(torch.rand(24, 1, 28, 28))
    images = given(train=image.repeat(2, 1, 1, 1).bfloat16(), test=image, layout="nchw")
    wanted = (image[5, 0].double() * 255).round().byte()
    assert torch.equal(images.test_images[5, 2:30, 2:30, 0], wanted)


def test_mean_and_deviation_are_those_of_the_training_images_as_hosts_see_them() -> None:
    content = user_files.arrays((28, 28, 3), val=True)
    images = given(train=content["train_images"], test=content["test_images"])
    values = images.train_images.double().flatten(0, 2) / 255
    assert images.mean == pytest.approx(values.mean(0).tolist(), abs=1e-12)
    assert images.std == pytest.approx(values.std(0, correction=0).tolist(), abs=1e-12)
    shown = ", ".join(f"{value:.4f}" for value in images.mean)
    assert images.notes[-2].startswith(f"normalised by mean {shown} and deviation")
    bank = images.banks[0]
    normalised = bank.values[0][images.train_images[..., 0].long()]
    assert float(normalised.mean()) == pytest.approx(0, abs=1e-5)
    assert float(normalised.std()) == pytest.approx(1, abs=1e-4)


def test_arguments_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    path = user_files.write(tmp_path / "m.npz", train_labels=np.zeros(48))
    told = r"=\.\.\.: must be left out: train is a file, which holds all parts\.$"
    for argument in ("test_labels", "val"):
        with pytest.raises(SettingError, match=f"^{argument}{told}"):
            esper_soa.images(path, **{argument: np.zeros(24, int)})
    told = "must be whole numbers, the classes from 0 on. Convert with .astype.numpy.int64.\\."
    with pytest.raises(
        DataError, match=rf"^data.root={path}: train_labels has type float64: {told}"
    ):
        loaded(path)
    masked = np.ma.masked_array(np.zeros((48, 28, 28), np.uint8))
    kinds = "must be a numpy array or a torch tensor. Lists become one with numpy.stack, "
    kinds += "masked arrays with .filled.0.\\."
    for argument, value, told in (
        ("train_labels", None, f"^train_labels=NoneType: {kinds}"),
        ("test", None, f"^test=NoneType: {kinds}"),
        ("train", masked, f"^train=MaskedArray: {kinds}"),
        ("train", [[1, 2]], f"^train=list: {kinds}"),
        (
            "shuffle",
            True,
            "shuffle=.*: must be left out: there is no such setting. There are layout, resize, "
            r"mean, std, size, channels, validation_images\.$",
        ),
        ("val_labels", np.zeros(3, int), f"^val=NoneType: {kinds}"),
        ("name", 3, r"^name=3: must be a text\.$"),
    ):
        with pytest.raises(SettingError, match=told):
            given(**{argument: value})


BYTES = np.zeros((48, 28, 28, 28), np.uint8)
ORDER = r"must be \[images, height, width, 1 or 3\], or \[images, height, width\]"
FURTHER = r".*\. Leave transparency and further channels out\.$"
SIDE = r"must have 1 to 1024 a side\. Hosts see 32x32: give smaller ones\.$"
TYPES = (
    r"must be uint8, from 0 to 255, or float, from 0 to 1\. (Convert whole .*65535|Convert with).*"
)
GREY = "test: 28x28 pixels with 1 channel, but the training images have"
SAME = r": must be the same\. Prepare all parts in one way\.$"
CLASSES = r"must be classes from 0 to 99999 at most\. Number them from 0 on\.$"
LIST = r"must be \[images\] or \[images, 1\]\."
SEVERAL = f"per image: {LIST} Sets with several labels per image, as ChestMNIST, cannot be used; "
SEVERAL += r"of one-hot labels take \.argmax\(1\)\.$"
BAD_ARRAYS = {
    "train": [
        (BYTES[:, 0, 0], rf"train has shape \[48, 28\]: {ORDER}, with layout=nhwc\.$"),
        (BYTES[..., :4], f"train has .* 4 channels {FURTHER}"),
        (BYTES[..., :0], r"train has shape \[48, 28, 28, 0\], which is 0 channels with"),
        (BYTES[:, :5], f"train has .* 28 channels {FURTHER}"),
        (BYTES, r"train has .*\. Volumes, as in MedMNIST's 3D sets, cannot be used\.$"),
        (BYTES[:0, 0], r"train has 0 images: must have 1 to 16777216\.$"),
        (np.broadcast_to(BYTES[:1, :1, :1, 0], (2**24 + 1, 1, 1)), "train has 16777217 images"),
        (BYTES[:, 0, :0], f"train has images of 0x28 pixels: {SIDE}"),
        (np.zeros((48, 1, 1025), np.uint8), f"train has images of 1x1025 pixels: {SIDE}"),
        (np.zeros((48, 1, 1024), np.uint8), "test: .* but the training images have 1x1024"),
        (BYTES[0].astype(np.int64), f"train has type int64: {TYPES}"),
        (BYTES[0].astype(bool), f"train has type bool: {TYPES}"),
        (BYTES[0].astype(complex), "train has type complex128"),
        (np.full((48, 28, 28), None), "train has type object"),
        (BYTES[:, 0, :, :27], f"{GREY} 28x27 pixels with 1 channel{SAME}"),
        (BYTES[..., :3], f"{GREY} 28x28 pixels with 3 channels{SAME}"),
        (BYTES[:47, 0], r"train_labels has 48 labels, but train has 47 images: must be as many\.$"),
        (BYTES[:, 0], r"train: every pixel of the training images is the same\.$"),
    ],
    "train_labels": [
        (np.zeros(48), "train_labels has type float64: must be whole numbers"),
        (np.zeros(48, bool), "train_labels has type bool"),
        (np.array(["cat"] * 48), r"train_labels has type <U3: .* numpy\.searchsorted\("),
        (np.full(48, -1), f"train_labels holds -1 at 0: {CLASSES}"),
        (np.arange(48) * 2500, f"train_labels holds 100000 at 40: {CLASSES}"),
        (np.full(48, 2**64 - 1, np.uint64), "train_labels holds 18446744073709551615 at 0"),
        (np.eye(48, 3, dtype=int), rf"train_labels has shape \[48, 3\], 3 labels {SEVERAL}"),
        (np.zeros((48, 0), int), r"train_labels has shape \[48, 0\], 0 labels per image"),
        (np.zeros((48, 1, 1), int), rf"train_labels has shape \[48, 1, 1\]: {LIST}$"),
        (np.zeros((), int), rf"train_labels has shape \[\]: {LIST}$"),
    ],
}


@pytest.mark.parametrize(
    ("argument", "array", "told"),
    [(name, *case) for name, cases in BAD_ARRAYS.items() for case in cases],
)
def test_arrays_that_cannot_be_right_are_refused_by_name_with_what_they_are(
    argument: str, array: np.ndarray, told: str
) -> None:
    with pytest.raises(DataError, match=f"^{told}") as caught:
        given(**{argument: array})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        *((np.nan, "Replace"), (np.inf, "Replace"), (-np.inf, "Replace")),
        *((-0.001, r".*\.clip\(0, 1\)"), (1.001, r".*\.clip\(0, 1\)"), (-1.0, r".*\(x \+ 1\) / 2")),
        *((255.0, r"Divide by 255\."), (65535.0, "Divide by .* 65535")),
    ],
)
def test_a_brightness_that_is_none_is_told_with_its_place_and_a_remedy_for_it(
    bad: float, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = np.full((48, 28, 28), 0.5, np.float32)
    train[31, 3, 4] = bad
    for at_once in (image_preparation.CHUNK_BYTES, 5 * train[0].nbytes, 1):
        monkeypatch.setattr(image_preparation, "CHUNK_BYTES", at_once)
        told = rf"^train holds {np.float32(bad)} in image 31: must be from 0 to 1\. {remedy}"
        with pytest.raises(DataError, match=told):
            given(train=train)


def test_a_channel_that_never_varies_is_left_as_it_is_and_told() -> None:
    train = user_files.arrays((28, 28, 3))["train_images"]
    test = np.zeros((24, 28, 28, 3), np.uint8)
    train[..., 1:] = 0
    images = given(train=train, test=test)
    assert images.std[1:] == (1.0, 1.0)
    assert images.notes[-2].endswith(" of the training images; green and blue never varies")
    assert bool(images.banks[0].values.isfinite().all())


def test_large_images_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_files.write(tmp_path / "m.npz", user_files.arrays((64, 64, 3)))
    whole = loaded(path)
    for at_once in (7 * 64 * 64 * 3, 1):
        monkeypatch.setattr(image_preparation, "CHUNK_BYTES", at_once)
        parts = loaded(path)
        assert parts.identity == whole.identity
        assert torch.equal(parts.train_images, whole.train_images)


def test_auto_takes_a_root_that_ends_in_npz_and_says_why(tmp_path: Path) -> None:
    path = user_files.write(tmp_path / "m.npz", VAL_images=np.zeros(3))
    images = load_images(DataConfig(root=str(path)), "cpu")
    assert images.notes[-1] == "without the arrays VAL_images"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    why = f"sha256 {digest[:12]}..., data.name=auto takes it as data.root is an .npz"
    counts = "39 training, 9 validation and 24 test images."
    assert images.source == f"own images from {path} ({why}): {counts}"
    facts = images.facts()
    own = {"classes": "3", "class_names": "[]", "file_sha256": digest}
    assert facts.items() >= (own | {"preparation": "; ".join(images.notes)}).items()
    assert images.identity == loaded(path).identity
    assert "asked for by data.name" in loaded(path).source
