"""Folders of image files: classes by their names, what is left out, what strangers put there."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import esper_soa
from esper_soa.config.nets import DataConfig
from esper_soa.nets.data.datasets import count_samples, load_images
from esper_soa.nets.data.folder import MOST_BYTES, set_aside_by_class
from esper_soa.nets.data.image_set import ImageSet
from esper_soa.nets.data.kept import keep, kept, kept_folder
from esper_soa.nets.model.pictures import preprocess
from esper_soa.system.errors import DataError, SettingError
from tests.builders import user_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "esper_soa").mkdir(parents=True, mode=0o700)
    return tmp_path / "cache" / "esper_soa" / "images"


def loaded(path: Path, **settings: object) -> ImageSet:
    return load_images(DataConfig(**({"name": "folder", "root": str(path)} | settings)), "cpu")  # type: ignore[arg-type]


def images_of(images: ImageSet) -> dict[bytes, int]:
    """The class of every image, by its bytes."""
    parts = ("train", "val", "test")
    pairs = [(vars(images)[f"{part}_images"], vars(images)[f"{part}_labels"]) for part in parts]
    return {
        image.numpy().tobytes(): int(label)
        for all_images, labels in pairs
        for image, label in zip(all_images, labels, strict=True)
    }


def test_files_of_every_kind_and_size_become_images_with_the_class_of_their_folder(
    tmp_path: Path,
) -> None:
    path = user_files.folder(tmp_path / "mine")
    images = loaded(path)
    assert (images.name, images.num_classes, images.class_names) == ("mine", 3, user_files.CLASSES)
    assert count_samples(DataConfig(name="folder", root=str(path))) == (36, 0)
    # a fifth of 36 for the test part, a fifth of the rest for validation; of each class the same
    counts = [
        vars(images)[f"{part}_labels"].bincount().tolist() for part in ("train", "val", "test")
    ]
    assert [sum(count) for count in counts] == [24, 5, 7]
    assert all(max(count) - min(count) <= 1 for count in counts)
    by_image = images_of(images)
    assert len(by_image) == 36
    for file in path.rglob("*.*"):
        pixels = (preprocess(images.input_spec(), file)[0] * 255).round().byte()
        code = by_image[pixels.permute(1, 2, 0).contiguous().numpy().tobytes()]
        assert user_files.CLASSES[code] == file.parent.name
    assert any("3 sizes of 20 to 54 pixels a side" in note for note in images.notes)
    assert any("18 grey" in note for note in images.notes)
    assert images.identity == esper_soa.images(path).identity


@pytest.mark.parametrize("names", [("train", "test"), ("train", "val"), ("Train", "valid", "Test")])
def test_folders_of_parts_are_the_parts_and_what_is_missing_is_set_aside(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        user_files.folder(tmp_path / "mine" / name, each=10 if name.lower() == "train" else 4)
    images = loaded(tmp_path / "mine", name="auto")
    found = [len(part) for part in (images.train_labels, images.val_labels, images.test_labels)]
    wanted = {2: {"test": [24, 6, 12], "val": [24, 12, 6]}.get(names[1]), 3: [30, 12, 12]}
    assert found == wanted[len(names)]
    assert "data.root is of class folders" in images.source


def test_every_class_gives_the_same_share_and_all_runs_leave_the_same_out() -> None:
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    train, aside = set_aside_by_class(np.arange(100), labels, 20, key=7)
    assert np.bincount(labels[aside]).tolist() == [12, 6, 2]
    assert sorted([*train, *aside]) == list(range(100))
    assert np.array_equal(set_aside_by_class(np.arange(100), labels, 20, key=7)[1], aside)
    assert not np.array_equal(set_aside_by_class(np.arange(100), labels, 20, key=6)[1], aside)
    assert not np.array_equal(aside, np.r_[:12, 60:66, 90:92])  # shuffled


def test_images_are_kept_as_hosts_see_them_and_made_anew_where_that_is_damaged(
    tmp_path: Path, cache: Path
) -> None:
    path = user_files.folder(tmp_path / "mine", each=5)
    first = loaded(path)
    (file,) = cache.iterdir()
    content = kept(file, np.dtype(np.uint8))
    assert content is not None
    assert len(content) == 15 * (16 + 32 * 32 * 3)
    changed = content.copy()
    changed[15 * 16 :] = np.arange(len(changed) - 15 * 16) % 251
    keep(file, changed)
    assert not torch.equal(loaded(path).train_images, first.train_images)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert loaded(path).identity == first.identity
    Image.new("L", (9, 9)).save(path / "Birne" / "new.png")
    assert len(images_of(loaded(path))) == 16
    assert len(list(cache.iterdir())) == 2


def test_without_a_cache_folder_images_are_read_all_the_same(tmp_path: Path, cache: Path) -> None:
    cache.parent.chmod(0o777)  # others could write in it
    cache.symlink_to(tmp_path)
    assert len(images_of(loaded(user_files.folder(tmp_path / "mine", each=5)))) == 15
    with pytest.raises(DataError, match="images cannot be kept"):
        kept_folder("images")


def write_bomb(path: Path, side: int) -> None:
    """A PNG of few bytes that says it has side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    content = chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize("side", [8193, 12_000, 60_000])
def test_bombs_of_pixels_are_left_out_before_they_are_unpacked(tmp_path: Path, side: int) -> None:
    path = user_files.folder(tmp_path / "mine", each=5)
    write_bomb(path / "Birne" / "bomb.png", side)
    images = loaded(path)
    assert len(images_of(images)) == 15
    assert "left out: 1 of more than 67,108,864 pixels (Birne/bomb.png)" in images.notes


def test_files_that_are_cut_off_or_no_images_are_left_out_and_named(tmp_path: Path) -> None:
    path = user_files.folder(tmp_path / "mine", each=8)
    whole = (path / "Birne" / "0_grey.png").read_bytes()
    (path / "Birne" / "0_grey.png").write_bytes(whole[: len(whole) // 2])
    (path / "Birne" / "1_größe.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n/x { (id) run } def")
    (path / "Birne" / "b\x1b[31m.png").write_bytes(b"")
    os.truncate(
        path / user_files.CLASSES[1] / "0_grey.png", MOST_BYTES + 1
    )  # a whole image, and zeros
    (path / "Birne" / "notes.txt").write_text("none")
    (path / ".hidden").mkdir()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(path / "Birne" / "floats.tiff")
    (note,) = [note for note in loaded(path).notes if note.startswith("left out")]
    assert note == (
        "left out: 1 hidden (.hidden); 1 of other endings (Birne/notes.txt); "
        "4 broken, cut off or of more than 256 MiB"
        " (Birne/0_grey.png, Birne/1_größe.jpg, Birne/b\\x1b[31m.png, ...); "
        "1 of numbers that are no levels of 8 or 16 bits (Birne/floats.tiff)"
    )


def test_links_and_pipes_are_left_out_and_not_followed(tmp_path: Path) -> None:
    secret = user_files.folder(tmp_path / "secret", each=5)
    path = user_files.folder(tmp_path / "mine", each=5)
    (path / "Birne" / "link.png").symlink_to(secret / "Birne" / "0_grey.png")
    (path / "linked").symlink_to(secret / "Birne")
    os.mkfifo(path / "Birne" / "pipe.png")
    images = loaded(path)
    assert images.class_names == user_files.CLASSES
    assert len(images_of(images)) == 15
    (note,) = [note for note in images.notes if note.startswith("left out")]
    assert note == "left out: 3 links, pipes or devices (Birne/link.png, Birne/pipe.png, linked)"
    # a path of the user's may have links
    (tmp_path / "place").symlink_to(path)
    assert loaded(tmp_path / "place").identity == images.identity


def test_folders_that_cannot_be_used_are_refused_in_a_line(tmp_path: Path) -> None:
    path = user_files.folder(tmp_path / "mine", each=5)
    with pytest.raises(DataError, match=r"^data.root=.*Birne: holds images of 0 classes: must "):
        loaded(path / "Birne")
    with pytest.raises(DataError, match="must be a folder that holds a folder for each class"):
        loaded(tmp_path / "none")
    with pytest.raises(SettingError, match="data.root='': must be a folder that holds"):
        loaded(Path(""), root="")
    with pytest.raises(SettingError, match="validation_images=12: must be so few"):
        loaded(path, validation_images=12)
    with pytest.raises(SettingError, match="data.resize=pad: must be auto, scale or stretch"):
        loaded(path, resize="pad")
    (path / "readme.txt").write_text("a")
    with pytest.raises(DataError, match="Class folders are data.name=folder"):
        loaded(path, name="auto")
