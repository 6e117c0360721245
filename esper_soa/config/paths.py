"""Paths that a user gives, and the folder of the configuration files. Needs no torch."""

import os
from contextlib import suppress
from pathlib import Path

from esper_soa.system.errors import SettingError, one_line


def config_dir() -> str:
    """The folder of the configuration files: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged_dir = package / "configs"
    return str(packaged_dir if packaged_dir.is_dir() else package.parent / "configs")


def user_path(setting: str, text: str) -> Path:
    """The path that `text` names, `~` expanded, whether or not there is anything.

    Raises SettingError for none: an unknown user's home, too long a name, bytes of no text.
    """
    path = Path(text)
    try:
        text.encode()
        path = path.expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # there may be nothing yet
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise SettingError(setting, text, f"a path that can be used ({reason})") from error
    return path


def holds_only_folders(path: Path) -> bool:
    """Whether a folder holds folders and nothing else, hidden names and CIFAR-10's aside."""
    with suppress(OSError), os.scandir(path) as entries:
        kinds = {each.name: each.is_dir() for each in entries if not each.name.startswith(".")}
        return all(kinds.values()) and bool(kinds) and "cifar-10-batches-py" not in kinds
    return False
