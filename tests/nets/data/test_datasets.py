"""Image sets: official layouts are read, what is broken or hostile is refused in clear words."""

import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from esper_soa.config.nets import DataConfig
from esper_soa.nets.data import datasets
from esper_soa.nets.data.cifar import BATCH_TITLES, parse_pickle, read_cifar10
from esper_soa.nets.data.datasets import FASHION32_FILE, FASHION32_MEAN, FASHION32_STD, load_images
from esper_soa.nets.data.image_set import set_aside
from esper_soa.system.errors import DataError, SettingError
from tests.builders import user_files

FASHION32_IDENTITY = "e4018691f7d881861cee64cc7deac90d728b3c55cbcaf85f395c5b359529ed36"
NAMES = tuple(BATCH_TITLES)
NUM_IMAGES = 3  # per batch file of the tests


def batch(number: int) -> tuple[np.ndarray, list[int]]:
    """Pixels uint8 [3, 3072] and labels of batch file `number`; all distinct."""
    pixels = np.random.default_rng(number).integers(0, 256, (NUM_IMAGES, 3072)).astype(np.uint8)
    return pixels, [number, 9, (number + 3) % 10]


def python2_pickle(number: int) -> bytes:
    """The batch as Python 2 and its numpy wrote it: protocol 2, byte strings, numpy.core names."""
    pixels, labels = batch(number)
    data = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x03M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
    )
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    name = (f"training batch {number + 1} of 5" if number < 5 else "testing batch 1 of 1").encode()
    label = b"U\x0bbatch_labelU" + bytes([len(name)]) + name
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels](" + numbers + b"e" + label + b"u."


def modern_pickle(number: int) -> bytes:
    """The batch as a present numpy pickles it, with text keys."""
    pixels, labels = batch(number)
    return pickle.dumps({"data": pixels, "labels": labels, "filenames": [b"", "x"]}, protocol=2)


def write_folder(folder: Path, content: Callable[[int], bytes]) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(content(number))
    return folder


def write_archive(path: Path, members: list[tuple[str, bytes]], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def official(content: Callable[[int], bytes]) -> list[tuple[str, bytes]]:
    members = [(f"cifar-10-batches/{name}", content(number)) for number, name in enumerate(NAMES)]
    return [("cifar-10-batches/readme.html", b"<html>"), *members]


def assert_all_batches(root: Path) -> None:
    (train_images, train_labels), (test_images, test_labels), _ = read_cifar10(str(root))
    pixels, labels = zip(*(batch(number) for number in range(6)), strict=True)
    assert train_labels.dtype == test_labels.dtype == np.int64
    assert train_labels.tolist() == sum(labels[:5], [])
    assert test_labels.tolist() == labels[5]
    assert train_images.shape == (15, 32, 32, 3)
    # the last image of batch 1, row 2, column 7, green: plane 1 of 1024 values, 32 per row
    assert train_images[5, 2, 7, 1] == pixels[1][2, 1024 + 2 * 32 + 7]
    assert np.array_equal(test_images.transpose(0, 3, 1, 2).reshape(3, 3072), pixels[5])


@pytest.mark.parametrize("content", [python2_pickle, modern_pickle])
def test_batches_are_read_from_their_folder_or_from_the_one_above(
    tmp_path: Path, content: Callable[[int], bytes]
) -> None:
    folder = write_folder(tmp_path / "cifar-10-batches-py", content)
    assert_all_batches(folder)
    assert_all_batches(tmp_path)


def test_archives_are_read_by_name_or_from_their_folder(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "cifar-10-python.tar.gz", official(python2_pickle))
    assert_all_batches(path)
    assert_all_batches(tmp_path)
    assert_all_batches(write_archive(tmp_path / "b.tar.gz", official(modern_pickle)))
    plain = official(modern_pickle)
    assert_all_batches(write_archive(tmp_path / "b.tar", plain, "w"))
    assert len([*tmp_path.iterdir()]) == 3  # nothing is unpacked there


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_runs_a_command_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    content = pickle.dumps({"data": user_files.Command(trace)}, protocol)
    with pytest.raises(DataError, match="^data_batch_1 .*lacks `data` or `labels`"):
        parse_pickle(content, "data_batch_1")
    assert not trace.exists()


def test_fortran_ordered_data_is_read_in_its_order() -> None:
    pixels, labels = batch(4)
    content = pickle.dumps({"data": np.asfortranarray(pixels), "labels": labels}, 2)
    assert np.array_equal(parse_pickle(content, "x")[0], parse_pickle(modern_pickle(4), "x")[0])


def test_broken_and_hostile_archives_are_refused(tmp_path: Path) -> None:
    content = python2_pickle(0)
    members = [("a/data_batch_1", content), ("data_batch_1", content)]
    twice = write_archive(tmp_path / "twice.tar.gz", members)
    whole = write_archive(tmp_path / "a.tar.gz", official(python2_pickle))
    other = write_archive(tmp_path / "other.tar", [("readme", b"hello")], "w")
    with tarfile.open(tmp_path / "link.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("data_batch_1")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        archive.addfile(link)
    for name, told in (
        (twice.name, ": holds data_batch_1 twice"),
        (other.name, f": CIFAR-10 is incomplete, without {', '.join(NAMES)}"),
        ("link.tar.gz", ": data_batch_1 is not a plain file of at most 64 MiB"),
    ):
        with pytest.raises(DataError, match=rf"^{tmp_path}/{name}{told}\. Fetch"):
            read_cifar10(str(tmp_path / name))
    packed = gzip.compress(b"x", mtime=0)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        sparse = tarfile.TarInfo("sparse")
        sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        archive.addfile(sparse)  # without the numbers that are due then
    damaged = (packed[:10] + b"\xff" * 20, packed[:-8] + bytes(8), stream.getvalue())
    for content in (whole.read_bytes()[:20000], b"<html>", b"", *damaged):
        (tmp_path / "broken.tar.gz").write_bytes(content)
        told = (
            r"broken\.tar\.gz: not a whole \.tar\.gz archive \(.*\w+.*\)\. For a file of your own "
        )
        with pytest.raises(DataError, match=f"^{tmp_path}/{told}"):
            read_cifar10(str(tmp_path / "broken.tar.gz"))


def test_samples_are_put_on_the_device_that_is_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cifar", modern_pickle)
    roots = [DataConfig(root=str(root)) for root in (folder, user_files.write(tmp_path / "m.npz"))]
    for cfg in (*roots, *map(DataConfig, ("fashion32", "text", "[synthetic,fashion32]"))):
        found = datasets.load_samples(cfg, "meta")
        parts = found.train_labels, found.val_labels, found.test_labels
        assert {part.device.type for part in parts} == {"meta"}


@esper_soa.dataset("shapeless")
class Shapeless:
    """A data set that does not say what its samples are like."""


def test_a_data_set_of_a_users_own_says_what_its_samples_are_like() -> None:
    name = f"{__name__}:shapeless"
    told = rf"^data\.name={name}: must be a class with a SampleSpec as spec\.$"
    with pytest.raises(SettingError, match=told):
        datasets.sample_spec(DataConfig(name))


@pytest.mark.parametrize(
    ("total", "asked", "count"), [(100, 0, 20), (30_000, 0, 5000), (30_000, 6000, 6000)]
)
def test_a_fifth_is_set_aside_and_no_more_than_a_test_part_needs(
    total: int, asked: int, count: int
) -> None:
    whole = np.zeros((total, 1, 1, 3), np.uint8), np.arange(total)
    (_, rest), (images, labels) = set_aside(whole, DataConfig(validation_images=asked))
    assert len(images) == len(labels) == count
    assert np.array_equal(np.union1d(rest, labels), whole[1])
    assert len(rest) == total - count


def test_fashion32_is_whole_balanced_and_mixed() -> None:
    images = load_images(DataConfig(name="fashion32"), "cpu")
    assert images.identity == FASHION32_IDENTITY
    assert images.train_images.shape == (4000, 32, 32, 3)
    assert images.val_images.shape == images.test_images.shape == (1000, 32, 32, 3)
    assert images.train_images.dtype == images.test_images.dtype == torch.uint8
    both = torch.cat((images.train_labels, images.val_labels))
    assert both.bincount().tolist() == [500] * 10
    assert images.val_labels.bincount().min() > 70
    assert images.test_labels.bincount().tolist() == [100] * 10
    assert images.train_labels[:100].unique().numel() == 10
    border = torch.ones(32, 32, dtype=torch.bool)
    border[2:30, 2:30] = False
    assert int(images.train_images[:, border].max()) == 0
    assert torch.equal(images.train_images[..., 0], images.train_images[..., 2])
    values = torch.cat((images.train_images, images.val_images))[..., 0].double() / 255
    assert (round(float(values.mean()), 4),) * 3 == FASHION32_MEAN
    assert (round(float(values.std()), 4),) * 3 == FASHION32_STD
    assert "Zalando" in (FASHION32_FILE.parent / "LICENSE-fashion-mnist.txt").read_text()


def test_synthetic_images_are_the_same_every_time_and_can_be_told_apart() -> None:
    images = load_images(DataConfig(name="synthetic", synthetic_train=40, synthetic_test=30), "cpu")
    more = load_images(DataConfig(name="synthetic", synthetic_train=50, synthetic_test=30), "cpu")
    assert torch.equal(more.train_images[:40], images.train_images)
    assert torch.equal(more.test_images, images.test_images)
    assert torch.equal(more.val_images, images.val_images)
    assert images.val_images.shape == images.test_images.shape
    cfg = DataConfig(name="synthetic", synthetic_train=40, synthetic_test=30, validation_images=7)
    assert len(load_images(cfg, "cpu").val_images) == 7
    values = images.train_images.double().flatten(0, 2) / 255
    assert images.mean == pytest.approx(values.mean(0).tolist(), abs=1e-12)
    assert images.std == pytest.approx(values.std(0, correction=0).tolist(), abs=1e-12)
    assert not torch.equal(images.val_images, images.test_images)
    assert images.train_labels.tolist() == list(range(10)) * 4
    # of the same class, under other noise
    assert not torch.equal(images.train_images[0], images.train_images[10])
    assert not torch.equal(images.train_images[0], images.test_images[0])
    means = images.train_images.double().view(4, 10, -1).mean(0)
    nearest = torch.cdist(images.test_images.double().flatten(1), means).argmin(1)
    assert torch.equal(nearest, images.test_labels)


def test_real_cifar_has_the_statistics_that_are_used_for_it() -> None:
    beside = Path(__file__).parents[4] / "shared" / "data" / "cifar-10-batches-py"
    folder = Path(os.environ.get("ESPER_SOA_CIFAR") or beside)
    if not folder.exists():
        pytest.skip("no CIFAR-10: set ESPER_SOA_CIFAR to the folder of its python batches")
    images = load_images(DataConfig(name="cifar10", root=str(folder)), "cpu")
    values = images.train_images.double().flatten(0, 2) / 255
    assert torch.allclose(values.mean(0), torch.tensor(images.mean).double(), atol=0.005)
    assert torch.allclose(values.std(0), torch.tensor(images.std).double(), atol=0.005)
    shares = images.train_labels.bincount() / len(images.train_labels)
    assert shares.shape == (10,)
    assert float(shares.min()) > 0.08
