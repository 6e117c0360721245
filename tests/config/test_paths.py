"""Paths of users, files that last, and the cache folder, which is its user's alone."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esper_soa.config import paths
from esper_soa.config.errors import SettingError, one_line


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\0", "embedded null byte"),
        ("x" * 256, "File name too long"),
        ("~nobody_here/x", "Could not determine home directory."),
        ("\udc80", "'utf-8' codec can't encode character '\\udc80' in position 0: surrogates"),
    ],
)
def test_a_path_that_cannot_be_used_is_told_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(SettingError) as raised:
        paths.user_path("to", text)
    given = one_line(text)
    assert str(raised.value).startswith(f"to={given}: must be a path that can be used ({reason}")


def test_a_path_may_lead_to_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (Path("~", "none"), tmp_path / "none", tmp_path / "file" / "below"):
        assert paths.user_path("to", str(path)) == path.expanduser()


def test_configuration_files_are_in_the_package_or_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "esper_soa" / "config" / "paths.py"))
    assert paths.config_dir() == str(tmp_path / "configs")
    (tmp_path / "esper_soa" / "configs").mkdir(parents=True)
    assert paths.config_dir() == str(tmp_path / "esper_soa" / "configs")


def fill(path: Path) -> None:
    with paths.replacing(path) as half:
        half.write_text("new")
        raise OSError(errno.ENOSPC, "full", "other")


def test_a_file_is_replaced_as_a_whole_or_stays_and_the_error_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with paths.replacing(path) as half:
        assert half == tmp_path / f"a.txt.{os.getpid()}.tmp", "of this process alone"
        half.write_text("old")
    with pytest.raises(OSError, match="full") as raised:
        fill(path)
    assert raised.value.filename == str(path)
    paths.sync(path)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"a.txt": "old"}


def test_a_cache_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    mask = os.umask(0)
    try:
        paths.open_folder(folder)
    finally:
        os.umask(mask)
    for mode in (0o700, 0o755, 0o701):
        folder.chmod(mode)
        paths.open_folder(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


def become_a_file(folder: Path) -> None:
    folder.rmdir()
    folder.touch()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "group": (lambda folder: folder.chmod(0o770), "others can write in {} (mode 770): delete it"),
    "all": (lambda folder: folder.chmod(0o722), "others can write in {} (mode 722): delete it"),
    "a link": (link, "{} is a link or no folder: delete it (Not a directory)"),
    "dangling": (
        lambda folder: (folder.rmdir(), folder.symlink_to("nowhere")),
        "{} is a link or no folder: delete it (Not a directory)",
    ),
    "a file": (become_a_file, "{} is a link or no folder: delete it (Not a directory)"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_folder_that_is_not_the_users_own_alone_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    change, words = REFUSED[damage]
    change(folder)
    with pytest.raises(paths.FolderError) as raised:
        paths.open_folder(folder)
    assert str(raised.value) == words.format(f"the cache folder {folder}")
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_another_user_is_refused_and_one_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "cache"
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    for folder, told in (
        (tmp_path, f"{tmp_path} belongs to user {me}: set XDG_CACHE_HOME to another"),
        (below, f"{below} cannot be written: [Errno 17] File exists: '{below.parent}'"),
    ):
        with pytest.raises(paths.FolderError) as raised:
            paths.open_folder(folder)
        assert str(raised.value) == f"the cache folder {told}"


def test_a_file_is_read_where_it_is_this_users_and_others_cannot_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    found = {name: paths.read_user_file(tmp_path / name) for name in ("file", "link", "fifo", "")}
    assert found == {"file": b"content"} | dict.fromkeys(("link", "fifo", ""))
    assert paths.read_user_file(tmp_path / "none") is None
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert paths.read_user_file(path) is None
    path.chmod(0o644)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert paths.read_user_file(path) is None


def test_drafts_of_an_hour_ago_are_deleted(tmp_path: Path) -> None:
    for name, age in (("draft-old", 3610), ("draft-new", 3590), ("kept", 9999)):
        (tmp_path / name / "below").mkdir(parents=True)
        os.utime(tmp_path / name, 2 * (time.time() - age,))
    (tmp_path / "draft-file").touch()
    os.utime(tmp_path / "draft-file", (0, 0))
    paths.drop_old_drafts(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["draft-file", "draft-new", "kept"]
