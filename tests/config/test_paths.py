"""Paths of users, files that last, and the cache folder, which is its user's alone."""

import errno
import os
import stat
import time
from collections.abc import Iterator
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


def test_a_folder_that_is_not_the_users_own_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name, mode in (("group", 0o770), ("all", 0o722), ("theirs", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    for name, target in (("link", "group"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
    no_folder = f"the cache folder {tmp_path}/{{}} is a link or no folder: delete it (Not a"
    below = f"{tmp_path}/file/below"
    me = os.geteuid()
    for name, told in {
        "group": f"others can write in the cache folder {tmp_path}/group (mode 770): delete it",
        "all": f"others can write in the cache folder {tmp_path}/all (mode 722): delete it",
        **{one: f"{no_folder.format(one)} directory)" for one in ("link", "dangling", "file")},
        "file/below": f"the cache folder {below} cannot be written: [Errno 17] File exists: "
        f"'{tmp_path}/file'",
        "theirs": f"the cache folder {tmp_path}/theirs belongs to user {me}: set XDG_CACHE_HOME to "
        "another",
    }.items():
        monkeypatch.setattr(os, "geteuid", lambda number=me + (name == "theirs"): number)
        with pytest.raises(paths.FolderError) as raised:
            paths.open_folder(tmp_path / name)
        assert str(raised.value) == told
    assert not (tmp_path / "nowhere").exists()


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
