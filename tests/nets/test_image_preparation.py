"""Own images: MedMNIST's files and arrays become what hosts see; the rest is refused by name."""

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from esper_soa.config.nets import DataConfig
from esper_soa.nets.data import image_preparation
from esper_soa.nets.data.batches import check_classes
from esper_soa.nets.data.datasets import ImageSet, count_samples, load_images
from esper_soa.system.errors import DataError, SettingError, UserError
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


def test_a_training_part_with_nothing_left_is_refused() -> None:
    left = r"so that some of the {} training images are left\. Or give more images\.$"
    told = "^validation_images=48: must be 1 to 47, "
    with pytest.raises(SettingError, match=told + left.format(48)):
        given(validation_images=48)
    few = {name: array[:4] for name, array in user_files.arrays().items()}
    parts = [few[name] for name in ("train_images", "train_labels", "test_images", "test_labels")]
    told = "^validation_images=0: must be 1 to 3, "
    with pytest.raises(SettingError, match=told + left.format(4)):
        esper_soa.images(*parts)


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
            rf"^task\.num_classes={wrong}: must be 6, the classes of m\. Give task\.num_classes=6\."
        )
        with pytest.raises(SettingError, match=told):
            check_classes(images, wrong)


def test_class_names_come_from_the_file_or_the_argument(tmp_path: Path) -> None:
    path = user_files.write(tmp_path / "m.npz", class_names=np.array(["cat", "dog", "eel", "fox"]))
    images = loaded(path)
    assert (images.num_classes, images.class_names) == (4, ("cat", "dog", "eel", "fox"))
    assert "4 classes: 0 cat, 1 dog, 2 eel, 3 fox" in images.notes
    assert esper_soa.images(path, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")
    assert given(class_names=("a", "b", "c")).facts()["class_names"] == '["a", "b", "c"]'
    assert given(class_names=["a", "b", "c", "d"]).identity != given().identity
    many = ["a\nb", *map(str, range(1, 21))]
    listed = ", ".join(["0 a\\nb", *(f"{number} {number}" for number in range(1, 20))])
    assert given(class_names=many[:20]).notes[-1] == f"20 classes: {listed}"
    assert given(class_names=many).notes[-1] == f"21 classes: {listed}, ..."


TEXTS = r"must be 2 to 100000 different texts, none empty\."


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["a", "b"],
            r"train_labels holds 2: must be at most 1, as class_names has 2\. "
            r"Name every class, or none\.",
        ),
        (["a", "b", "b"], f"class_names=a, b, b: {TEXTS}"),
        (["a", "b", " "], f"class_names=a, b,  : {TEXTS}"),
        (["a", "b", 3], f"class_names=a, b, 3: {TEXTS}"),
        (["a", ["b"]], rf"class_names=a, \['b'\]: {TEXTS}"),
        (["a"], f"class_names=a: {TEXTS}"),
        ([*map(str, range(100_001))], rf"class_names=0, 1, .*\.\.\.: {TEXTS}"),
        ("abc", r"class_names=abc: must be a list of texts\."),
    ],
)
def test_class_names_that_cannot_be_right_are_refused(names: object, told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}$"):
        given(class_names=names)


def test_class_names_of_a_file_are_texts(tmp_path: Path) -> None:
    texts = r": must be a list of texts\. Save numpy.array\(\['cat', 'dog'\]\)\.$"
    for names, kind in (
        (np.array([[1, 2]]), r"\[1, 2\] and type int64"),
        (np.array([b"a", b"b", b"c"]), r"\[3\] and type \|S1"),
        (np.array("abc"), r"\[\] and type <U3"),
    ):
        told = f"^data.root={tmp_path}/m.npz: class_names has shape {kind}{texts}"
        with pytest.raises(DataError, match=told):
            loaded(user_files.write(tmp_path / "m.npz", class_names=names))
    with pytest.raises(DataError, match="class_names holds Python objects"):
        loaded(user_files.write(tmp_path / "m.npz", class_names=np.array(["a", None], object)))


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


def test_nchw_must_be_said_and_the_remedy_says_so(tmp_path: Path) -> None:
    train = np.zeros((48, 3, 32, 32), np.uint8)
    test = np.zeros((24, 3, 32, 32), np.uint8)
    train[:, 1, 0, 5] = 9
    images = given(train=train, test=test, layout="nchw")
    assert images.train_images[7, 0, 5].tolist() == [0, 9, 0]
    told = r"^train has shape \[48, 3, 32, 32\], which is 32 channels with layout=nhwc: must be "
    told += r"\[images, height, width, 1 or 3\], or \[images, height, width\]\. "
    remedy = r"Give layout=nchw if channels are the second index\."
    with pytest.raises(DataError, match=f"{told}{remedy}"):
        given(train=train, test=test)
    path = user_files.write(tmp_path / "m\n.npz", train_images=train, test_images=test)
    told = r"with data\.layout=nhwc: .* Give data\.layout=nchw if"
    with pytest.raises(DataError, match=told):
        loaded(path)
    assert loaded(path, layout="nchw").name == "m\\n"
    told = r"must be \[images, 1 or 3, height, width\], or \[images, height, width\]\. "
    remedy = r"Give layout=nhwc if channels are the last index\."
    with pytest.raises(DataError, match=f"{told}{remedy}"):
        given(train=np.moveaxis(train, 1, 3), test=test, layout="nchw")


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


def test_mean_and_deviation_may_be_given_for_all_channels_or_for_each(tmp_path: Path) -> None:
    path = user_files.write(tmp_path / "m.npz")
    one = loaded(path, mean=[0.5], std=[0.25])
    three = loaded(path, mean=[0.1, 0.2, 0.3], std=[1, 2, 3])
    assert (one.mean, one.std) == ((0.5,) * 3, (0.25,) * 3)
    assert (three.mean, three.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    told = "0.5000, 0.5000, 0.5000 and deviation 0.2500, 0.2500, 0.2500, as data.mean says"
    assert one.notes[-2] == f"normalised by mean {told}"
    # another normalisation, other images
    assert len({one.identity, three.identity, loaded(path).identity}) == 3
    assert given(mean=[0.5], std=[0.25]).identity == one.identity


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mean": [0.5, 0.5], "std": [1, 1]}, "mean=[0.5, 0.5]: must be empty, one number, or one"),
        ({"mean": [0.5]}, "std=[]: must be as many numbers as {0}mean=[0.5]. Give both or neither"),
        ({"mean": [0.5], "std": [0.0]}, "std=0.0: must be in [0.001, 10]"),
        ({"mean": [127.0], "std": [60.0]}, "mean=127.0: must be in [0, 1]"),
        ({"layout": "hwc"}, "layout=hwc: must be one of nhwc, nchw"),
        ({"resize": "crop"}, "resize=crop: must be one of auto, pad, scale, stretch"),
        ({"validation_images": -1}, "validation_images=-1: must be in [0, 10000000]"),
    ],
)
def test_a_wrong_choice_is_refused_by_its_name_in_a_run_and_as_an_argument(
    settings: dict, told: str
) -> None:
    with pytest.raises(SettingError) as in_run:
        DataConfig(name="npz", root="m.npz", **settings)
    assert str(in_run.value).startswith("data." + told.format("data."))
    with pytest.raises(SettingError) as as_argument:
        given(**settings)
    assert str(as_argument.value).startswith(told.format(""))


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
            r"mean, std, validation_images\.$",
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
    r"must be uint8, from 0 to 255, or float, from 0 to 1\. Convert whole numbers from 0 to 255 "
)
TYPES += r"with \.astype\(numpy\.uint8\)\.$"
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


def test_labels_that_are_all_0_are_refused() -> None:
    told = r"^train_labels: all labels are 0: must be of at least 2 classes\.$"
    with pytest.raises(DataError, match=told):
        given(train_labels=np.zeros(48, int), test_labels=np.zeros(24, int))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.001, 1.001, 255.0])
def test_a_brightness_that_is_none_is_told_with_its_place(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = np.full((48, 28, 28), 0.5, np.float32)
    train[31, 3, 4] = bad
    for at_once in (image_preparation.CHUNK_BYTES, 5 * train[0].nbytes, 1):
        monkeypatch.setattr(image_preparation, "CHUNK_BYTES", at_once)
        told = rf"^train holds {np.float32(bad)} in image 31: must be from 0 to 1\. Divide by 255, "
        told += r"or give uint8, and replace what is not a number\."
        with pytest.raises(DataError, match=told):
            given(train=train)


def test_missing_keys_are_named_and_others_told(tmp_path: Path) -> None:
    for gone in user_files.arrays():
        content = {key: array for key, array in user_files.arrays().items() if key != gone}
        keys = ", ".join(user_files.arrays())
        told = rf"^data.root={tmp_path}/m.npz: lacks {gone}: must have {keys}\. It holds "
        with pytest.raises(DataError, match=told):
            loaded(user_files.write(tmp_path / "m.npz", content))
    told = r"lacks train_images, train_labels, test_images, .*It holds x_train, y_train\.$"
    other = {"x_train": np.zeros(3), "y_train": np.zeros(3)}
    with pytest.raises(DataError, match=told):
        loaded(user_files.write(tmp_path / "m.npz", other))
    content = user_files.arrays(val=True)
    del content["val_labels"]
    path = user_files.write(tmp_path / "m.npz", content)
    told = f"^train={path}: val_images is there alone: must have both val_images and val_labels.$"
    with pytest.raises(DataError, match=told):
        esper_soa.images(path)


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
    path = user_files.write(tmp_path / "m.npz")
    images = load_images(DataConfig(root=str(path)), "cpu")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    why = f"sha256 {digest[:12]}..., data.name=auto takes it as data.root is an .npz"
    counts = "39 training, 9 validation and 24 test images."
    assert images.source == f"own images from {path} ({why}): {counts}"
    facts = images.facts()
    own = {"classes": "3", "class_names": "[]", "file_sha256": digest}
    assert facts.items() >= (own | {"preparation": "; ".join(images.notes)}).items()
    assert images.identity == loaded(path).identity
    assert "asked for by data.name" in loaded(path).source


@pytest.mark.parametrize("other", [{}, {"name": "given"}, {"name": "cifar10", "root": "/c"}])
def test_settings_that_other_sets_would_not_heed_are_refused(other: dict) -> None:
    for name, value in (("resize", "pad"), ("layout", "nchw")):
        told = (
            rf"^data\.{name}=.*: must be left out with data\.name=.*own images: data.root=mine.npz"
        )
        with pytest.raises(SettingError, match=told):
            DataConfig(**{name: value}, **other)
        DataConfig(**{name: value}, root="m.NPZ")


def test_a_set_that_only_a_program_can_hand_over_and_a_file_that_is_not_named_are_refused() -> None:
    for name, told in (
        (
            "given",
            r"name=given: must be npz, or another set that can be read\. A program handed the "
            r"images over: save them as an \.npz for use without it",
        ),
        ("npz", r"root='': must be a file like mine\.npz when data\.name=npz"),
        ("cifar10", "root='': must be the folder or archive of CIFAR-10 when data.name=cifar10"),
    ):
        with pytest.raises(SettingError, match=rf"^data\.{told}\.$"):
            load_images(DataConfig(name=name), "cpu")
    assert tuple(count_samples(DataConfig(name="npz"))) == (0, 0)


def test_a_set_is_shown_in_words_and_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("esper_soa").propagate = True
    with caplog.at_level(logging.INFO, "esper_soa"):
        images = given(name="mine")
    assert repr(images) == str(images)
    counts = "39 training, 9 validation and 24 test images."
    told = [f"mine: own images from arrays, handed over: {counts}", *images.notes]
    assert str(images) == "\n  ".join(told)
    assert f"data     {images}" in caplog.text
