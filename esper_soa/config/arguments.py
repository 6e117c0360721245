"""The command line before Hydra reads it. Needs neither torch nor Hydra."""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import yaml

from esper_soa.config.env import ENV_SETTINGS
from esper_soa.config.gone import GONE, gone_text
from esper_soa.config.paths import config_dir
from esper_soa.system.errors import SettingError, UserError, did_you_mean, unknown_setting_text

# Flags of Hydra that take no value; one between overrides ends in an error.
LONE_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve")
ADDED_GROUPS = ("experiment", "budget", "sweep")  # no default has an option of these
OTHER_FOLDERS = ("--config-dir", "-cd", "hydra.searchpath")  # bring options that are not ours
SLOT_COUNTS = re.compile(r"slots=(choice\()?\d+(,\d+)*\)?")
OPTION_NAME = re.compile(r"[\w-]+\b(?!\()")  # what a bracket follows is a function of Hydra's
# Lists and ranges of values that differ by env, which Hydra takes as the text of the field.
ENV_TEXT = re.compile(r"\[[^\[\]]*\]|\b(log_)?uniform\([^()]*\)")
SHARE = re.compile(r"(?<![^\[, ])(\d+(?:\.\d+)?)%(?![^\], ])")  # of the env-steps of an episode


def show_help_or_version(name: str) -> bool:
    """Print what --help or --version asks for, of the configuration `name`; whether one does.

    Hydra would compose the configuration before its own help, which takes most of a second.
    """
    if "--version" in sys.argv:
        version = import_module("importlib.metadata").version
        packages = ("esper-soa", "torch", "tensordict", "hydra-core")
        program, *others = (f"{package} {version(package)}" for package in packages)
        print(f"{program} (Python {sys.version.split()[0]}, {', '.join(others)})")
    elif {"--help", "-h"} & {*sys.argv}:
        text = Path(config_dir(), f"{name}.yaml").read_text(encoding="utf-8")
        words = yaml.safe_load(text)["hydra"]["help"]["template"]
        lines = [f"{group}: {', '.join(names)}\n" for group, names in options().items() if names]
        print(words.replace("$APP_CONFIG_GROUPS", "".join(lines)))
    else:
        return False
    return True


def options() -> dict[str, list[str]]:
    """The options of every group of the configuration, in the order of the alphabet."""
    groups = sorted(path for path in Path(config_dir()).iterdir() if path.is_dir())
    return {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in groups}


def prepare_arguments(arguments: Sequence[str], settings: type) -> list[str]:
    """`arguments`, plain flags first and slots as lists; raises UserError as `check_overrides`.

    Those of shell completion, whose words are no settings, are left to Hydra.
    """
    if {"-sc", "--shell-completion"} & {*arguments}:
        return list(arguments)
    check_overrides(arguments, settings)
    return sorted(expand_slots(arguments), key=lambda argument: argument not in LONE_FLAGS)


def expand_slots(overrides: Sequence[str]) -> list[str]:
    """`overrides` as Hydra's type check asks for: the count slots=3 is the list slots=[3], and what
    differs by env, task.host_lr=[0.01,0.02], a text, as are several controls. Times of a schedule
    that are shares of `steps`, policy.schedule.fossilize=20%, are what `settings.share` makes.
    """
    return [_expand(*override.partition("=")) for override in overrides]


def _expand(key: str, equals: str, value: str) -> str:
    if key.lstrip("+") in {*ENV_SETTINGS, "control"} and not {"'", '"'} & {*value}:
        value = ENV_TEXT.sub(r"'\g<0>'", value)
    elif key.startswith("policy.schedule."):
        value = SHARE.sub(r"${share:\1}", value)
    elif SLOT_COUNTS.fullmatch(f"{key}={value}"):
        value = re.sub(r"(\d+)", r"[\1]", value)
    return f"{key}{equals}{value}"


def check_overrides(overrides: Sequence[str], settings: type) -> None:
    """Raise UserError for an override of no field of `settings` or group, or of no option of it.

    What is added ('+key=value') or belongs to Hydra is left to it.
    """
    groups = options()
    others = any(override.startswith(OTHER_FOLDERS) for override in overrides)
    for override in overrides:
        key, equals, value = override.partition("=")
        if key.lstrip("+") in groups and not others:
            check_options(key, value, groups[key.lstrip("+")])
        if key.startswith("--") and equals and is_setting(key.lstrip("-"), settings):
            raise UserError(f"{override}: settings have no dashes. Give {override.lstrip('-')}")
        added = key[:1] in ("-", "+", "~")
        if equals and not added and "/" not in key and key.split(".")[0] != "hydra":
            check_key(key.split("@")[0], settings, tuple(groups))


def is_setting(key: str, settings: type) -> bool:
    """Whether the dotted key is a field of `settings`, or a group of options."""
    try:
        check_key(key, settings, tuple(options()))
    except UserError:
        return False
    return True


def check_options(key: str, value: str, known: Sequence[str]) -> None:
    """Raise UserError unless each of the options that `value` names is `known`.

    key: a group, with a "+" where the override adds it. Interpolations, patterns and arguments of
    Hydra's functions are left to Hydra.
    """
    group = key.lstrip("+")
    if group in ADDED_GROUPS and key == group:
        raise UserError(f"{key}={value}: must be added. Give +{key}={value}.")
    for name in () if {*"{:*?="} & {*value} else OPTION_NAME.findall(value):
        if name not in known:
            raise SettingError(group, name, ", ".join(known), remedy=did_you_mean(name, known))


def check_key(key: str, settings: type, groups: Sequence[str] = ()) -> None:
    """Raise UserError for a dotted key that is no group, and no field or part of a mapping."""
    node: object = settings
    before = ""
    for name in key.split("."):
        if not is_dataclass(node):
            return
        known = {item.name: item.type for item in fields(node)}
        if name not in known:
            if before + name in GONE:
                raise UserError(gone_text(before + name))
            others = () if before else groups
            raise UserError(unknown_setting_text(before + name, [*known, *others]))
        node = known[name]
        before += f"{name}."
