"""Paths that a user gives: `~` is expanded, and what cannot be a path is refused by the name of its
setting; and files that are to last; and where the package keeps its configuration.

Needs no torch.
"""

import os
from pathlib import Path

from esper_soa.errors import SettingError


def config_dir() -> str:
    """The folder of the configuration files: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return str(packaged if packaged.is_dir() else package.parent / "configs")


def user_path(setting: str, given: str) -> Path:
    """The path that `given` names, whether or not there is anything.

    Raises SettingError for none: an unknown user's home, too long a name, bytes of no text.
    """
    if "\0" in given or given != given.encode("utf-8", "ignore").decode("utf-8"):
        raise SettingError(setting, given, "a path of UTF-8 characters")
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        raise SettingError(
            setting, given, "a path in a known home folder", "Write the home folder out."
        ) from error
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise SettingError(setting, given, f"a path that can be used ({error.strerror})") from error
    return path


def sync(path: Path) -> None:
    """Make the file `path`, or the names in the folder `path`, survive a power cut; or OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
