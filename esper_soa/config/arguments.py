"""The command line before Hydra reads it. Needs neither torch nor Hydra."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_origin

import yaml

from esper_soa.config.env import ENV_SETTINGS
from esper_soa.config.gone import GONE, gone_text
from esper_soa.config.paths import config_dir
from esper_soa.system.errors import SettingError, UserError, check, did_you_mean

# Flags of Hydra that take no value; one between overrides ends in an error.
LONE_FLAGS = ("-m", "--multirun", "-r", "--run", "--resolve")
SWEEP_FLAGS = {"-m", "--multirun"}
ADDED_GROUPS = ("experiment", "budget", "sweep")  # no default has an option of these
OTHER_FOLDERS = ("--config-dir", "-cd", "hydra.searchpath")  # bring options that are not ours
SLOT_COUNTS = re.compile(r"slots=(choice\()?\d+(,\d+)*\)?")
OPTION_NAME = re.compile(r"[\w-]+\b(?!\()")  # what a bracket follows is a function of Hydra's
# Lists and ranges of values that differ by env, which Hydra takes as the text of the field.
ENV_TEXT = re.compile(r"\[[^\[\]]*\]|\b(log_)?uniform\([^()]*\)")
COMPUTED = re.compile(r"[({'\"]|null$")  # functions, interpolations, texts in quotes
ENCLOSED = re.compile(r"\[[^\[\]]*\]|\{[^{}]*\}|\([^()]*\)|'[^']*'|\"[^\"]*\"")
TEXTS: dict[object, tuple[re.Pattern[str], str]] = {  # of values, by the type of the setting
    int: (re.compile(r"[+-]?\d[\d_]*"), "a whole number"),
    bool: (re.compile(r"(?i)true|false|yes|no|on|off|y|n|[01]"), "true or false"),
}
OTHER_NAMES = {"random_seed": "seed", "random_seeds": "seed", "out": "run_dir"}
INSTEAD = {  # of an option that the group lacks
    "task": "A host of your own is task.host=module:name.",
    "reward": "A reward of your own is reward.mode=module:name.",
    "policy": "A trained policy is policy.init=NAME, an agent of your own policy.name=module:name.",
    "experiment": "Your own FOLDER/experiment/NAME.yaml takes --config-dir=FOLDER too.",
}
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
    check_words(arguments, settings)
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


def check_words(arguments: Sequence[str], settings: type) -> None:
    """Raise UserError for a word without "=" that is no flag's, and for a search without -m."""
    for before, word in zip(("", *arguments), arguments, strict=False):
        is_flags = before.startswith("-") and "=" not in before and before not in LONE_FLAGS
        if "=" not in word and word[:1] not in ("-", "~") and not is_flags:
            guess = f"+experiment={word}" if word in options()["experiment"] else "NAME=VALUE"
            guess = f"checkpoint={word}" if is_setting("checkpoint", settings) else guess
            raise UserError(f"{word}: a setting takes a name and a value. Give {guess}")
        if word.startswith("+sweep=") and not SWEEP_FLAGS & {*arguments}:
            raise UserError(f"{word}: a sweep takes the flag -m. Give -m {word}")


def check_overrides(overrides: Sequence[str], settings: type) -> None:
    """Raise UserError for an override of no field of `settings` or group, of no option of it, or
    with a value that is no text of the field's type.

    What is added ('+key=value') or belongs to Hydra is left to it.
    """
    groups = options()
    others = any(override.startswith(OTHER_FOLDERS) for override in overrides)
    is_sweep = bool(SWEEP_FLAGS & {*overrides})
    for override, after in zip(overrides, (*overrides[1:], ""), strict=False):
        key, equals, value = override.partition("=")
        if key.lstrip("+") in groups and is_setting("checkpoint", settings):
            raise UserError(f"{override}: an evaluation takes this from the run of checkpoint=")
        if key.lstrip("+") in groups and not others:
            check_options(key, value, groups[key.lstrip("+")])
        if key.startswith("--") and (key[2:] in groups or is_setting(key[2:], settings)):
            plus = "+" if key[2:] in ADDED_GROUPS else ""
            given = f"{plus}{key[2:]}={value if equals else after}"
            raise UserError(f"{override}: settings have no dashes. Give {given}")
        added = key[:1] in ("-", "+", "~")
        if equals and not added and "/" not in key and key.split(".")[0] != "hydra":
            kind = check_key(key.split("@")[0], settings, tuple(groups))
            check_text(override, kind, is_sweep)


def is_setting(key: str, settings: type) -> bool:
    """Whether the dotted key is a field of `settings`."""
    try:
        check_key(key, settings)
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
    check(not value.endswith(".yaml"), group, value, allowed="a name without .yaml")
    for name in () if {*"{:*?="} & {*value} else OPTION_NAME.findall(value):
        if name not in known:
            remedy = did_you_mean(name, known) or INSTEAD.get(group, "")
            raise SettingError(group, name, ", ".join(known), remedy=remedy)


def check_text(override: str, kind: object, is_sweep: bool) -> None:
    """Raise UserError for a value that is no text of the type, or several values without a sweep.

    kind: that of the setting, None where it is not known. What Hydra computes is left to it.
    """
    key, _, value = _expand(*override.partition("=")).partition("=")
    is_list = get_origin(kind) is list
    left = value
    while left != (left := ENCLOSED.sub("", left)):
        pass  # from the innermost brackets outwards
    several = "," in left and not is_sweep
    quoted = f"Quotes keep a list with blanks together: '{key}=[...]'."
    check(not {"[", "]"} & {*left}, key, value, allowed="whole lists", remedy=quoted)
    if several and (is_list or key in {*ENV_SETTINGS, "control"}):
        raise SettingError(key, value, "a list", remedy=f"Give {key}=[{value}], or -m for a sweep.")
    remedy = "A sweep over several takes the flag -m."
    check(not several, key, value, allowed="a single value", remedy=remedy)
    if "," in left or COMPUTED.search(value):
        return
    is_right = not is_list or value[:1] == "["
    check(is_right, key, value, allowed="a list", remedy=f"Give {key}=[{value}].")
    if kind in TEXTS:
        pattern, allowed = TEXTS[kind]
        check(pattern.fullmatch(value) is not None, key, value, allowed=allowed)


def check_key(key: str, settings: type, groups: Sequence[str] = ()) -> object:
    """The type of the setting with this dotted key, None for a group and parts of a mapping.

    Raises UserError for a key that is none of these.
    """
    node: object = settings
    before = ""
    for name in key.split("."):
        if not is_dataclass(node):
            return None
        known = {item.name: item.type for item in fields(node)}
        if name not in known:
            if before + name in GONE:
                raise UserError(gone_text(before + name))
            others = () if before else groups
            remedy = did_you_mean(OTHER_NAMES.get(key, name), [*known, *others], before)
            alike = [path for path in setting_names(settings) if f".{path}".endswith(f".{name}")]
            remedy = remedy or (f"Did you mean {' or '.join(alike)}?" if alike else "")
            raise UserError(f"{before}{name}: there is no such setting. {remedy}".rstrip())
        node = known[name]
        before += f"{name}."
    return node


def setting_names(settings: object, before: str = "") -> Iterator[str]:
    """The dotted names of all settings."""
    for item in fields(settings) if is_dataclass(settings) else ():
        if is_dataclass(item.type):
            yield from setting_names(item.type, f"{before}{item.name}.")
        else:
            yield before + item.name
