"""Files of arrays: read in parts, trusted in nothing, each fault one message naming the file."""

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from esper_soa import images
from esper_soa.nets.data.npz import LazyArray, check_ratio, npz_arrays
from esper_soa.system.errors import DataError
from tests.builders import user_files

REMEDY = (
    r"Save the arrays anew: numpy\.savez\('mine\.npz', train_images=\.+, train_labels=\.+, \.+\)\.$"
)
BROKEN = r": is broken, truncated, encrypted, no \.npz or no plain array \(.*\w+.*\)\. " + REMEDY


def member(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """An .npz whose array `a` is `content`."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a.npy", content)
    return path


def part(path: Path, **arrays: np.ndarray) -> LazyArray:
    """The array `a` of the file at `path`, into which `arrays` are written first."""
    if arrays:
        np.savez(path, **arrays)
    return npz_arrays(path, "data.root=x.npz", ("a",))[0]["a"]


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<f4", ">f8", "f2", "U5", "?"])
def test_arrays_are_read_as_they_were_saved(tmp_path: Path, dtype: str) -> None:
    array = np.arange(60).reshape(5, 4, 3).astype(dtype)
    np.savez_compressed(tmp_path / "b.npz", a=array)
    fortran = part(tmp_path / "c.npz", a=np.asfortranarray(array))
    for found in (part(tmp_path / "a.npz", a=array), part(tmp_path / "b.npz"), fortran):
        whole = found.whole()
        assert whole.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(whole, array)
    for none in (array[:0], array[:, :0]):
        assert part(tmp_path / "d.npz", a=none).whole().shape == none.shape


def test_rows_come_in_parts_of_bounded_size_and_together_are_the_array(tmp_path: Path) -> None:
    array = np.arange(70, dtype=np.uint8).reshape(7, 10)
    found = part(tmp_path / "a.npz", a=array)
    for most, sizes in ((29, [2, 2, 2, 1]), (1, [1] * 7), (1000, [7])):
        parts = list(found.rows(most))
        assert [len(one) for one in parts] == sizes
        assert np.array_equal(np.concatenate(parts), array)


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    objects = np.empty(2, object)
    objects[:] = user_files.Command(trace)
    told = r"^data\.root=x\.npz: a holds Python objects, which would have to be unpickled "
    told += r"and never are\. Give all images one shape and convert: "
    told += r"numpy\.stack\(\.\.\.\)\.astype\(numpy\.uint8\)\. " + REMEDY
    for array in (objects, np.zeros(2, [("a", object), ("b", int)])):
        with pytest.raises(DataError, match=told):
            part(tmp_path / "a.npz", a=array)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"<html></html>", pickle.dumps([1]), member(np.zeros(3)), b"PK\x03\x04" + bytes(99)],
)
def test_what_is_no_npz_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^data.root=x.npz{BROKEN}"):
        part(path)


def test_other_packings_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", member(np.zeros(3)), zipfile.ZIP_BZIP2)
    told = r"^data\.root=x\.npz: a is packed by method 12: must be stored or deflated\. "
    with pytest.raises(DataError, match=told + REMEDY):
        part(path)


HEADER = b"\x93NUMPY\x01\x00"


def headed(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"
    return HEADER + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        HEADER,
        HEADER + b"\xff\xff" + bytes(20),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY\x03\x00" + bytes(20),
        b"\x93NUMPY\x09\x00" + bytes(20),
        headed("__import__('os').getcwd()"),
        headed("(" * 9000),
        headed("(-1,)"),
        headed("(9,)") + bytes(8),
        headed("(9,)") + bytes(10),
        headed(f"({10**30},)"),
        headed("(65536, 1048576)"),
    ],
)
def test_a_header_that_is_broken_or_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    path = archive(tmp_path / "a.npz", content)
    lies = r" does not have the bytes of its shape \[.*\] and type uint8, but \d+\. " + REMEDY
    with pytest.raises(DataError, match=rf"^data\.root=x\.npz: a({BROKEN}|{lies})"):
        part(path)


def test_a_small_file_that_unpacks_to_much_is_refused_before_anything_is(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", member(np.zeros(80 << 20, np.uint8)), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    told = (
        r"^data\.root=x\.npz: a is \d+ bytes that unpack to 83886080: must be at most 200 times as "
    )
    told += r"many\. Save images with numpy\.savez, uncompressed\.$"
    with little_memory(), pytest.raises(DataError, match=told):
        part(path)


def test_what_unpacks_to_much_is_judged_by_its_packed_bytes_beyond_a_small_size() -> None:
    most = (64 << 20) + 10 * 200
    check_ratio("it", 10, most)
    with pytest.raises(DataError, match="^it: must be at most 200 times as many"):
        check_ratio("it", 10, most + 1)


def test_images_that_become_much_larger_than_their_file_are_refused_before_they_are(
    tmp_path: Path,
) -> None:
    labels = np.arange(10**6) % 2
    content = user_files.arrays((1, 1)) | {"train_images": np.zeros((10**6, 1, 1), np.uint8)}
    np.savez_compressed(tmp_path / "a.npz", **(content | {"train_labels": labels}))
    path = tmp_path / "a.npz"
    told = (
        f"^train={path}: {path.stat().st_size} bytes hold 1000024 images of 3072 bytes: must be at"
    )
    with pytest.raises(DataError, match=told):
        images(path)
