"""Paths that a user gives, files that are to last, and our configuration. Needs no torch."""

import os
from pathlib import Path

from esper_soa.config.errors import SettingError, one_line


def config_dir() -> str:
    """The folder of the configuration files: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "configs"
    return str(packaged if packaged.is_dir() else package.parent / "configs")


def user_path(setting: str, given: str) -> Path:
    """The path that `given` names, `~` expanded, whether or not there is anything.

    Raises SettingError for none: an unknown user's home, too long a name, bytes of no text.
    """
    path = Path(given)
    try:
        given.encode()
        path = path.expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # there may be nothing yet
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise SettingError(setting, given, f"a path that can be used ({reason})") from error
    return path


def sync(path: Path) -> None:
    """Make the file `path`, or the names in the folder `path`, survive a power cut; or OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
