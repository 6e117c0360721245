"""The command line before Hydra reads it: help, our version, flags anywhere, settings that do not
exist.

Needs no torch.
"""

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import yaml

from esper_soa.errors import UserError, unknown_setting
from esper_soa.paths import config_dir

# Flags of Hydra that take no value. It reads overrides in one piece, so that a flag between them
# ends in an error.
LONE_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve")

SLOT_COUNTS = re.compile(r"slots=\d+(,\d+)*")


def answered(name: str) -> bool:
    """Whether the command line of the configuration `name` asks for no more than help or our
    version, which is then printed.
    """
    if "--version" in sys.argv[1:]:
        version = import_module("importlib.metadata").version
        ours, *others = (
            f"{one} {version(one)}" for one in ("esper-soa", "torch", "tensordict", "hydra-core")
        )
        print(f"{ours} (Python {sys.version.split()[0]}, {', '.join(others)})")
    elif {"--help", "-h"} & {*sys.argv[1:]}:
        print(help_text(Path(config_dir()), name))
    else:
        return False
    return True


def help_text(folder: Path, name: str) -> str:
    """The help in the configuration file `name`, with all groups of the folder and their options.

    Hydra would compose the configuration first, which takes most of a second.
    """
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
    words = yaml.safe_load(text)["hydra"]["help"]["template"]
    options = {
        group: sorted(path.stem for path in (folder / group).glob("*.yaml"))
        for group in groups_in(str(folder))
    }
    listed = [f"{group}: {', '.join(names)}" for group, names in options.items() if names]
    return words.replace("$APP_CONFIG_GROUPS", "\n".join(listed) + "\n")


def prepared(arguments: Sequence[str], settings: type, groups: Collection[str]) -> list[str]:
    """`arguments`, plain flags first and slots as lists; raises UserError as `check_overrides`."""
    check_overrides(arguments, settings, groups)
    given = listed_slots(arguments)
    return [
        *(one for one in given if one in LONE_FLAGS),
        *(one for one in given if one not in LONE_FLAGS),
    ]


def listed_slots(overrides: Sequence[str]) -> list[str]:
    """`overrides` with the count slots=3 as the list slots=[3] that Hydra's type check asks for."""
    return [
        re.sub(r"(\d+)", r"[\1]", one) if SLOT_COUNTS.fullmatch(one) else one for one in overrides
    ]


def check_overrides(overrides: Sequence[str], settings: type, groups: Collection[str]) -> None:
    """Raise UserError for an override of neither a field of `settings` nor one of the `groups`.

    What is added ('+key=value') or belongs to Hydra is left to it.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        added = key[:1] in ("-", "+", "~")
        if equals and not added and "/" not in key and key.split(".")[0] != "hydra":
            _check_key(key.split("@")[0], settings, groups)


def groups_in(folder: str) -> list[str]:
    """The configuration groups in a folder of configuration files."""
    return sorted(path.name for path in Path(folder).iterdir() if path.is_dir())


def _check_key(key: str, settings: type, groups: Collection[str]) -> None:
    """Refuse a dotted key that leads to no field; what is below a mapping is not ours to know."""
    if key in groups:
        return
    within: object = settings
    done: list[str] = []
    for name in key.split("."):
        if not is_dataclass(within):
            return
        known = [item.name for item in fields(within)]
        if name not in known:
            raise UserError(
                unknown_setting(".".join([*done, name]), known if done else [*known, *groups])
            )
        within = get_type_hints(within)[name]
        done = [*done, name]
