"""Paths of users, and the folder of the configuration files."""

from pathlib import Path

import pytest

from esper_soa.config import paths
from esper_soa.system.errors import SettingError, one_line


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
