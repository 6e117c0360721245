"""Ranges of settings: each stands in the line of its field, and is checked as it is made."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeVar, cast

from esper_soa.config.registry import is_reference
from esper_soa.system.errors import check

RULE = "rule"  # key of a field's metadata
COUNT = 10**9  # most env-steps, rounds, images: sums and products of two stay within int64
WEIGHT = 1e6  # most of a weight, threshold or reward term: products of a few stay within float32
MAX_ITEMS = 64  # of a list
NAME_PATTERN = re.compile(r"(?!\.*\Z)[\w.+-]{1,60}")

LIST_PATTERN = re.compile(r"\[([^\[\]]+)\]")
DRAW_PATTERN = re.compile(r"(log_)?uniform\(([^,()]+),([^,()]+)\)")

Number = TypeVar("Number", int, float)
# A number, or as text what gives each env its own: a list, [1,2], of which envs take one in turn,
# or a range, uniform(1,2) or log_uniform(1,2), of which they draw in every round.
EnvNumber = int | float | str
# By dotted name of a setting that differs by env: its value in every env of the run, in a round.
EnvSettings = Mapping[str, Sequence[float | str]]
NO_SETTINGS: EnvSettings = MappingProxyType({})


class Settings:
    """A dataclass of settings, checked as it is made; messages have `path` before their names."""

    path: ClassVar[str]

    def __init_subclass__(cls, path: str = "") -> None:
        cls.path = path

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = vars(self)[item.name]
            rule = item.metadata.get(RULE)
            if rule is not None:
                rule.check(self.path + item.name, value)
            if isinstance(rule, EnvRange) and not isinstance(value, str):
                # a union has kept 1 as an int, and 1.0 as a float
                vars(self)[item.name] = int(value) if rule.whole else float(value)

    @classmethod
    def env_ranges(cls) -> dict[str, "EnvRange"]:
        """By dotted name, the ranges of the fields of which each env can have its own."""
        rules = {cls.path + item.name: item.metadata.get(RULE) for item in fields(cls)}  # type: ignore[arg-type]
        return {name: rule for name, rule in rules.items() if isinstance(rule, EnvRange)}

    @property
    def differing(self) -> tuple[str, ...]:
        """Those of `env_ranges` that do differ by env."""
        own = {name: vars(self)[name.removeprefix(self.path)] for name in self.env_ranges()}
        return tuple(name for name, value in own.items() if isinstance(value, str))

    def number(self, name: str) -> float:
        """The number of a field, the same for all envs; SettingError where each has its own."""
        value = vars(self)[name]
        check(
            not isinstance(value, str),
            self.path + name,
            value,
            allowed="one number for all envs here",
        )
        return float(value)

    def require(self, ok: bool, name: str, allowed: str, remedy: str = "") -> None:
        """Raise SettingError for the setting `name`, dotted where it is of a part, unless `ok`."""
        check(ok, self.path + name, attrgetter(name)(self), allowed=allowed, remedy=remedy)


class Rule:
    """What a value must be; its words say what is allowed."""

    def holds(self, value: object) -> bool:
        """Whether `value` is allowed."""
        raise NotImplementedError

    def check(self, setting: str, value: object) -> None:
        """Raise SettingError, which names `setting`, the value and what is allowed."""
        check(self.holds(value), setting, value, allowed=str(self))


@dataclass(frozen=True)
class Range(Rule):
    """Finite numbers between two ends, which '[' and ']' take in; NaN lies in no range."""

    low: float
    high: float
    ends: str = "[]"
    note: str = ""  # what one of the values means, or why others are not allowed

    def holds(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        low = value > self.low if self.ends[0] == "(" else value >= self.low
        return low and (value < self.high if self.ends[1] == ")" else value <= self.high)

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"in {self.ends[0]}{self.low:.15g}, {self.high:.15g}{self.ends[1]}{note}"


class EnvDraw(NamedTuple):
    """A range that every env draws a number of in every round."""

    low: float
    high: float
    log: bool  # its logarithm is what is uniform
    whole: bool = False  # whole numbers alone, low and high among them

    def at(self, share: float) -> float:
        """The number that lies this share in [0, 1) of the way from low to high."""
        high = self.high + self.whole
        if self.log:
            number = self.low * (high / self.low) ** share
        else:
            number = self.low + share * (high - self.low)
        return min(math.floor(number) if self.whole else number, self.high)


@dataclass(frozen=True)
class EnvRange(Range):
    """A number within the range, or as text a list or a range of them; see EnvNumber."""

    whole: bool = False  # whole numbers alone

    def holds(self, value: object) -> bool:
        whole = not self.whole or (isinstance(value, int | float) and value % 1 == 0)
        return whole and super().holds(value)

    def check(self, setting: str, value: object) -> None:
        if not isinstance(value, str):
            super().check(setting, value)
            return
        try:
            numbers = env_numbers(value)
        except ValueError:
            numbers = ()
        check(0 < len(numbers) <= MAX_ITEMS, setting, value, allowed=str(self))
        for one in numbers[:2] if isinstance(numbers, EnvDraw) else numbers:
            check(self.holds(one), setting, one, allowed=str(self))
        if isinstance(numbers, EnvDraw):
            rises = numbers.low < numbers.high and (numbers.low > 0 or not numbers.log)
            check(rises, setting, value, allowed="a range that rises, of log_uniform from above 0")

    def __str__(self) -> str:
        each = f"a list of at most {MAX_ITEMS} such numbers, of which envs take one in turn"
        drawn = "or uniform(a,b) or log_uniform(a,b), of which they draw"
        return f"{'a whole number ' * self.whole}{super().__str__()}, or {each}, {drawn}"


@dataclass(frozen=True)
class Choice(Rule):
    """One of several words, a part of a user's own, or as text a list of the `listed` words."""

    words: tuple[str, ...]
    own: str = ""  # the kind of part that may be named instead, as `module:name`; see registry.py
    listed: tuple[str, ...] = ()  # see `env_words`

    def holds(self, value: object) -> bool:
        """The existence of a user's part is checked when the run is built."""
        words = env_words(str(value))
        if words == (value,):
            return value in self.words or (self.own != "" and is_reference(str(value)))
        return len(words) <= MAX_ITEMS and set(words) <= set(self.listed)

    def __str__(self) -> str:
        own = f", or module:name of your own {self.own}" if self.own else ""
        text = "one of " + ", ".join(self.words) + own
        if not self.listed:
            return text
        each = f"a list such as [{self.listed[0]},{self.listed[1]}] of at most {MAX_ITEMS} of"
        return f"{text}, or {each} {', '.join(self.listed)}, of which envs take one in turn"


@dataclass(frozen=True)
class TextPattern(Rule):
    """A text that matches a pattern."""

    pattern: re.Pattern[str]
    described: str

    def holds(self, value: object) -> bool:
        return self.pattern.fullmatch(str(value)) is not None

    def __str__(self) -> str:
        return self.described


FOLDER_NAME = "a folder name of at most 60 letters, digits, '_', '-', '+' and '.'"
FOLDER = TextPattern(NAME_PATTERN, FOLDER_NAME)


@dataclass(frozen=True)
class Items(Rule):
    """A list of different items that follow a rule, at least `least` of them."""

    rule: Rule
    least: int
    repeated: bool = False  # the same item may occur twice

    def check(self, setting: str, value: object) -> None:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        check(is_list, setting, value, allowed="a list")
        items = list(cast(Sequence, value))
        size = f"a list of {self.least} to {MAX_ITEMS} items, each {self.rule}"
        check(self.least <= len(items) <= MAX_ITEMS, setting, value, allowed=size)
        for item in items:
            self.rule.check(setting, item)
        different = self.repeated or len(set(items)) == len(items)
        check(different, setting, value, allowed="without repetition")


@dataclass(frozen=True)
class NumberTable(Rule):
    """A number for each of `keys`."""

    keys: tuple[str, ...]
    rule: Range

    def check(self, setting: str, value: object) -> None:
        table = value if isinstance(value, dict) else {}
        allowed = "a number for each of " + ", ".join(self.keys)
        check(set(table) == set(self.keys), setting, ", ".join(map(str, table)), allowed=allowed)
        for key, number in table.items():
            self.rule.check(f"{setting}.{key}", number)


def number(default: Number, low: float, high: float, ends: str = "[]", note: str = "") -> Number:
    """A field for a number within the range; see Range."""
    return field(default=default, metadata={RULE: Range(low, high, ends, note)})


def env_number(
    default: float, low: float, high: float, ends: str = "[]", note: str = ""
) -> EnvNumber:
    """A field for a number within the range, or for what gives each env its own; see EnvNumber."""
    return field(default=default, metadata={RULE: EnvRange(low, high, ends, note)})


def env_count(default: int, low: int, high: int, note: str = "") -> EnvNumber:
    """A field as of `env_number`, for whole numbers."""
    return field(default=default, metadata={RULE: EnvRange(low, high, note=note, whole=True)})


def env_numbers(value: EnvNumber, whole: bool = False) -> tuple[float, ...] | EnvDraw:
    """The numbers of a list, of which env i takes number i modulo how many there are, the range
    that envs draw of, or the one number. ValueError for other texts.
    """
    if not isinstance(value, str):
        return (float(value),)
    plain = value.replace(" ", "")
    if found := LIST_PATTERN.fullmatch(plain):
        return tuple(map(float, found[1].split(",")))
    if found := DRAW_PATTERN.fullmatch(plain):
        return EnvDraw(float(found[2]), float(found[3]), found[1] is not None, whole=whole)
    raise ValueError(f"{value} is neither a list nor a range")


def env_words(value: str) -> tuple[str, ...]:
    """The words of a list, of which env i takes number i modulo how many there are, or the one."""
    found = LIST_PATTERN.fullmatch(value.replace(" ", ""))
    return tuple(found[1].split(",")) if found else (value,)


def weight(default: float) -> float:
    """A field for a weight, a threshold or a penalty that is not negative."""
    return number(default, 0, WEIGHT)


def signed(default: float) -> float:
    """A field for a weight or a term of either sign."""
    return number(default, -WEIGHT, WEIGHT)


def word(default: str, rule: TextPattern = FOLDER) -> str:
    """A field for a word of a pattern; without one it must be able to name a folder."""
    return field(default=default, metadata={RULE: rule})


def choice(
    default: str, words: tuple[str, ...], own: str = "", listed: tuple[str, ...] = ()
) -> str:
    """A field for one of `words`, for a user's part of the kind `own`, or for a list of `listed`
    words, of which envs take one in turn.
    """
    return field(default=default, metadata={RULE: Choice(words, own, listed)})


def choices(
    default: Sequence[str],
    words: tuple[str, ...],
    repeated: bool = False,
    own: str = "",
    least: int = 1,
) -> list[str]:
    """A field for a list of at least `least` of what `choice` takes; unlike unless `repeated`."""
    rule = Items(Choice(words, own), least, repeated)
    return field(default_factory=lambda: list(default), metadata={RULE: rule})


def numbers(default: Sequence[Number], low: float, high: float, least: int = 1) -> list[Number]:
    """A field for a list of numbers within the range."""
    rule = Items(Range(low, high), least, repeated=True)
    return field(default_factory=lambda: list(default), metadata={RULE: rule})


def table(default: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """A field for a number within the range for each key of `default`."""
    rule = NumberTable(tuple(default), Range(low, high))
    return field(default_factory=lambda: dict(default), metadata={RULE: rule})
