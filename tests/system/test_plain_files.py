"""What is no plain file, or lies behind a link, is refused by name and left as it is."""

import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from esper_soa.system import plain_files
from esper_soa.system.files import LineFile, write_bytes, write_text
from esper_soa.system.json_lines import keep_rounds
from esper_soa.system.plain_files import NotPlainError, list_folder, make_folder, read_text, remove


def append(path: Path) -> None:
    with closing(LineFile(path)) as file:
        file.write("x")


FILES: dict[str, Callable[[Path], object]] = {
    "read": read_text,
    "cut": lambda path: keep_rounds(path, 0),
    "append": append,
    "replace": lambda path: write_text(path, "x"),
    "replace by bytes": lambda path: write_bytes(path, b"x"),
}
FOLDERS = {"list": list_folder, "make": make_folder}
FOLDERS |= {f"{name} in": lambda path, use=use: use(path / "file") for name, use in FILES.items()}
FOLDERS |= {"delete in": lambda path: remove(path / "file")}
FOLDERS |= {"make in": lambda path: make_folder(path / "below" / "inner")}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_links_and_pipes_are_neither_files_nor_folders(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text('{"round": 1}\n')
    (tmp_path / "link").symlink_to(outside / "file" if name in FILES else outside)
    (tmp_path / "gone").symlink_to(outside / "new")
    os.mkfifo(tmp_path / "pipe")
    for place in ("link", "gone", "pipe"):
        with pytest.raises(NotPlainError, match=f"^{tmp_path}/{place}: "):
            (FILES | FOLDERS)[name](tmp_path / place)
    assert {path: path.read_text() for path in outside.iterdir()} == {
        outside / "file": '{"round": 1}\n'
    }
    odd = sorted(plain_files.find_not_plain([tmp_path]))
    assert odd == [tmp_path / place for place in ("gone", "link", "pipe")]


@pytest.mark.parametrize("name", FILES)
def test_a_hard_link_is_read_and_replaced_and_never_written_in_place(
    tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_text('{"round": 1}\n')
    (tmp_path / "link").hardlink_to(outside)
    in_place = pytest.raises(NotPlainError, match=f"^{tmp_path}/link: a hard link")
    with in_place if name in ("cut", "append") else nullcontext():
        FILES[name](tmp_path / "link")
    assert outside.read_text() == '{"round": 1}\n'


def test_paths_are_taken_as_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(Path("a/b/c"))
    write_text(Path("a/b/../b/text"), "x")
    assert read_text(Path("a/b/text")) == (tmp_path / "a/b/text").read_text() == "x"
    (tmp_path / "usual").touch()
    assert (tmp_path / "usual").stat().st_mode == (tmp_path / "a/b/text").stat().st_mode
    (tmp_path / "a" / "link").symlink_to("b")
    assert list_folder(Path("a")) == {Path("a/b"): "folder", Path("a/link"): "other"}
    assert list_folder(Path("none")) == list_folder(Path("a/b/text")) == {}
    for name in ("a/b/text", "a/link", "a/none"):
        remove(Path(name))
    assert list_folder(Path("a")) == {Path("a/b"): "folder"}
