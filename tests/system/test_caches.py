"""The cache folder, which is its user's alone."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_soa.system import caches


@pytest.fixture(autouse=True)
def _closes_what_it_opens() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_cache_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    mask = os.umask(0)
    try:
        caches.open_folder(folder)
    finally:
        os.umask(mask)
    for mode in (0o700, 0o755, 0o701):
        folder.chmod(mode)
        caches.open_folder(folder)
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
        with pytest.raises(caches.FolderError) as raised:
            caches.open_folder(tmp_path / name)
        assert str(raised.value) == told
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_read_where_it_is_this_users_and_others_cannot_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    found = {name: caches.read_user_file(tmp_path / name) for name in ("file", "link", "fifo", "")}
    assert found == {"file": b"content"} | dict.fromkeys(("link", "fifo", ""))
    assert caches.read_user_file(tmp_path / "none") is None
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert caches.read_user_file(path) is None
    path.chmod(0o644)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert caches.read_user_file(path) is None


def test_drafts_of_an_hour_ago_are_deleted(tmp_path: Path) -> None:
    for name, age in (("draft-old", 3610), ("draft-new", 3590), ("kept", 9999)):
        (tmp_path / name / "below").mkdir(parents=True)
        os.utime(tmp_path / name, 2 * (time.time() - age,))
    (tmp_path / "draft-file").touch()
    os.utime(tmp_path / "draft-file", (0, 0))
    caches.drop_old_drafts(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["draft-file", "draft-new", "kept"]
