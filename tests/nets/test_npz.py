"""Files of arrays: read in parts, trusted in nothing, and every fault is one message with the name
of the file.
"""

import hashlib
import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from esper_soa.errors import DataError
from esper_soa.nets import npz
from esper_soa.nets.npz import open_npz


def saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def member(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def read(path: Path, name: str = "a", most: int = 1 << 20) -> np.ndarray:
    with open_npz(path, "data.root=x.npz") as file:
        return file.whole(name, most)


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<f4", ">f8", "f2", "U5", "?"])
def test_arrays_are_read_as_they_were_saved(tmp_path: Path, dtype: str) -> None:
    array = np.arange(60).reshape(5, 4, 3).astype(dtype)
    for path in (saved(tmp_path / "a.npz", a=array), tmp_path / "b.npz"):
        if not path.exists():
            np.savez_compressed(path, a=array)
        found = read(path)
        assert found.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(found, array)


def test_rows_come_in_parts_of_bounded_size_and_together_are_the_array(tmp_path: Path) -> None:
    array = np.arange(70, dtype=np.uint8).reshape(7, 10)
    with open_npz(saved(tmp_path / "a.npz", a=array), "x") as file:
        for most, sizes in ((10, [1] * 7), (29, [2, 2, 2, 1]), (1, [1] * 7), (1000, [7])):
            parts = list(file.rows("a", most))
            assert [len(one) for one in parts] == sizes
            assert np.array_equal(np.concatenate(parts), array)


def test_arrays_in_fortran_order_are_read_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.asfortranarray(np.arange(60).reshape(5, 4, 3))
    path = saved(tmp_path / "a.npz", a=array)
    assert np.array_equal(read(path), array)
    monkeypatch.setattr(npz, "MAX_WHOLE_BYTES", 100)
    with pytest.raises(DataError, match="a is in Fortran order and larger than"):
        read(path)


def test_an_empty_array_is_read(tmp_path: Path) -> None:
    assert read(saved(tmp_path / "a.npz", a=np.empty((0, 3)))).shape == (0, 3)


class Command:
    """Pickles to a call of os.system that would make the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    objects = np.empty(2, object)
    objects[:] = Command(trace)
    for array in (objects, np.zeros(2, [("a", object), ("b", int)])):
        with pytest.raises(
            DataError,
            match=r"^data\.root=x\.npz: a holds Python objects, .* never are\. .*numpy\.stack",
        ):
            read(saved(tmp_path / "a.npz", a=array))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not an .npz file"),
        (b"<html>not found</html>", "is not an .npz file"),
        (pickle.dumps([1, 2]), "is not an .npz file"),
        (member(np.zeros(3)), "is one .npy array, not an .npz of several"),
        (b"PK\x03\x04" + bytes(100), "is broken, truncated or encrypted"),
    ],
)
def test_what_is_no_npz_is_told_apart(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^data.root=x.npz: {told}.*numpy.savez"):
        read(path)


HEADER = b"\x93NUMPY\x01\x00"


def headed(text: str) -> bytes:
    return HEADER + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no plain array"),
        (b"hello", "no plain array"),
        (HEADER, "no plain array"),
        (HEADER + b"\xff\xff" + bytes(20), "no plain array"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "no plain array"),
        (b"\x93NUMPY\x03\x00" + bytes(20), "no plain array"),
        (b"\x93NUMPY\x09\x00" + bytes(20), "no plain array"),
        (headed("__import__('os').getcwd()"), "no plain array"),
        (headed("(" * 9000), "no plain array"),
        (headed("{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}"), "no plain array"),
        (
            headed("{'descr': '|u1', 'fortran_order': False, 'shape': (9,)}") + bytes(8),
            "does not have the 9 bytes",
        ),
        (
            headed("{'descr': '|u1', 'fortran_order': False, 'shape': (9,)}") + bytes(10),
            "does not have the 9 bytes",
        ),
        (
            headed(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({10**30},)}}"),
            "must have at most 32 GiB",
        ),
        (
            headed("{'descr': '|u1', 'fortran_order': False, 'shape': (65536, 1048576)}"),
            "64.0 GiB: must have at most",
        ),
    ],
)
def test_a_header_that_is_broken_or_lies_is_refused(
    tmp_path: Path, content: bytes, told: str
) -> None:
    with pytest.raises(DataError, match=f"^data.root=x.npz: a .*{told}"):
        read(archive(tmp_path / "a.npz", {"a.npy": content}))


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    long = b"\x93NUMPY\x02\x00" + (1 << 26).to_bytes(4, "little") + b" " * (1 << 26)
    path = archive(tmp_path / "a.npz", {"a.npy": long}, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="no plain array"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_an_array_of_more_bytes_than_allowed_is_not_read_whole(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npz", a=np.zeros(100, np.uint8))
    assert len(read(path, most=100)) == 100
    with pytest.raises(DataError, match="a has shape .100. and type uint8: must have at most"):
        read(path, most=99)


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("a.npy", member(np.zeros(2)))
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a.npy", member(np.ones(2)))
    with pytest.raises(DataError, match=r"holds a\.npy twice"):
        read(tmp_path / "a.npz")


def test_a_file_that_was_cut_off_or_changed_anywhere_is_refused_or_read_right(
    tmp_path: Path,
) -> None:
    array = np.arange(200, dtype=np.uint8)
    np.savez_compressed(tmp_path / "a.npz", a=array)
    whole = (tmp_path / "a.npz").read_bytes()
    path = tmp_path / "b.npz"
    refused = 0
    for place in range(len(whole)):
        for content in (
            whole[:place],
            whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :],
        ):
            path.write_bytes(content)
            try:
                with open_npz(path, "x") as file:
                    right = "a" not in file.names or np.array_equal(file.whole("a", 1000), array)
                assert right, place
            except DataError:
                refused += 1
    assert refused > len(whole)  # every cut, and most changes


def test_a_place_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data\.root=x\.npz: there is no such file"):
        read(tmp_path / "nowhere.npz")
    with pytest.raises(DataError, match="is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="is not a file"):
        read(tmp_path / "pipe.npz")


def test_the_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npz", a=np.arange(5))
    with open_npz(path, "x") as file:
        file.whole("a", 100)
        assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert np.array_equal(file.whole("a", 100), np.arange(5))
