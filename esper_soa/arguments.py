"""The command line before Hydra reads it: flags wherever they stand, our version, and settings that do not exist.

Called by train.py and evaluate.py through command.py. Needs no torch.
"""

import platform
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import get_type_hints

from esper_soa.errors import UserError, unknown_setting

# Flags of Hydra that take no value. It reads overrides in one piece, so that a flag between them ends in an error.
LONE_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve")


def version_line() -> str:
    """Our version, and those of what a run depends on most."""
    named = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "tensordict", "hydra-core"))
    return f"esper-soa {metadata.version('esper-soa')} (Python {platform.python_version()}, {named})"


def prepared(arguments: Sequence[str], settings: type, groups: Collection[str]) -> list[str]:
    """`arguments` with the flags that take no value first; raises UserError as `check_overrides`."""
    check_overrides(arguments, settings, groups)
    return [*(one for one in arguments if one in LONE_FLAGS), *(one for one in arguments if one not in LONE_FLAGS)]


def check_overrides(overrides: Sequence[str], settings: type, groups: Collection[str]) -> None:
    """Raise UserError for an override of what is neither a field of `settings` nor one of the configuration `groups`.

    What is added ('+key=value') or belongs to Hydra is left to it.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        if equals and key[:1] not in ("-", "+", "~") and "/" not in key and key.split(".")[0] != "hydra":
            _check_key(key.split("@")[0], settings, groups)


def groups_in(folder: str) -> list[str]:
    """The configuration groups in a folder of configuration files."""
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def _check_key(key: str, settings: type, groups: Collection[str]) -> None:
    """Refuse a dotted key that leads to no field; what stands below a mapping is not ours to know."""
    if key in groups:
        return
    within: object = settings
    done: list[str] = []
    for name in key.split("."):
        if not is_dataclass(within):
            return
        known = [item.name for item in fields(within)]
        if name not in known:
            raise UserError(unknown_setting(".".join([*done, name]), known if done else [*known, *groups]))
        within, done = get_type_hints(within)[name], [*done, name]
