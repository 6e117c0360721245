"""Ranges of settings: each stands in the line of its field, and is checked as they are made.

Needs no torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import ClassVar, TypeVar, cast

from esper_soa.config.errors import check
from esper_soa.config.registry import is_reference

RULE = "rule"  # key of a field's metadata
COUNT = 10**9  # most env-steps, rounds, images: sums and products of two stay within int64
# most of a weight, a threshold or a reward term: products of a few stay within float32
WEIGHT = 1e6
MAX_ITEMS = 64  # of a list
NAME_PATTERN = re.compile(r"(?!\.*\Z)[\w.+-]{1,60}")

LIST_PATTERN = re.compile(r"\[([^\[\]]+)\]")

Number = TypeVar("Number", int, float)
EnvNumber = int | float | str  # a number, or as text a list of them, of which envs take one in turn


class Settings:
    """A dataclass of settings, checked as it is made; messages have `path` before their names."""

    path: ClassVar[str]

    def __init_subclass__(cls, path: str = "") -> None:
        cls.path = path

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if RULE in item.metadata:
                item.metadata[RULE].check(self.path + item.name, vars(self)[item.name])

    def require(self, ok: bool, name: str, allowed: str, remedy: str = "") -> None:
        """Raise SettingError for the setting `name`, dotted where it is of a part, unless `ok`."""
        check(ok, self.path + name, attrgetter(name)(self), allowed, remedy)


class Rule:
    """What a value must be; its words say what is allowed."""

    def holds(self, value: object) -> bool:
        """Whether `value` is allowed."""
        raise NotImplementedError

    def check(self, setting: str, value: object) -> None:
        """Raise SettingError, which names `setting`, the value and what is allowed."""
        check(self.holds(value), setting, value, str(self))


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
        return f"in {self.ends[0]}{_plain(self.low)}, {_plain(self.high)}{self.ends[1]}{note}"


@dataclass(frozen=True)
class EnvRange(Range):
    """A number within the range, or a list of them as text, of which envs take one in turn."""

    def check(self, setting: str, value: object) -> None:
        try:
            numbers = env_numbers(cast(EnvNumber, value)) if isinstance(value, str) else (value,)
        except ValueError:
            numbers = ()
        check(0 < len(numbers) <= MAX_ITEMS, setting, value, str(self))
        for one in numbers:
            check(self.holds(one), setting, one, str(self))

    def __str__(self) -> str:
        each = f"a list of at most {MAX_ITEMS} such numbers, of which envs take one in turn"
        return f"{super().__str__()}, or {each}"


@dataclass(frozen=True)
class Choice(Rule):
    """One of several words, or a part of a user's own."""

    words: tuple[str, ...]
    own: str = ""  # the kind of part that may be named instead, as `module:name`; see registry.py

    def holds(self, value: object) -> bool:
        """The existence of a user's part is checked when the run is built."""
        return value in self.words or (self.own != "" and is_reference(str(value)))

    def __str__(self) -> str:
        own = f", or module:name of your own {self.own}" if self.own else ""
        return "one of " + ", ".join(self.words) + own


@dataclass(frozen=True)
class TextPattern(Rule):
    """A text that matches a pattern."""

    pattern: re.Pattern[str]
    described: str

    def holds(self, value: object) -> bool:
        return self.pattern.fullmatch(str(value)) is not None

    def __str__(self) -> str:
        return self.described


FOLDER = TextPattern(
    NAME_PATTERN, "a folder name of at most 60 letters, digits, '_', '-', '+' and '.'"
)


@dataclass(frozen=True)
class Items(Rule):
    """A list of different items that follow a rule, at least `least` of them."""

    rule: Rule
    least: int
    repeated: bool = False  # the same item may occur twice

    def check(self, setting: str, value: object) -> None:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        check(is_list, setting, value, "a list")
        items = list(cast(Sequence, value))
        size = f"a list of {self.least} to {MAX_ITEMS} items, each {self.rule}"
        check(self.least <= len(items) <= MAX_ITEMS, setting, value, size)
        for item in items:
            self.rule.check(setting, item)
        different = self.repeated or len(set(items)) == len(items)
        check(different, setting, value, "without repetition")


@dataclass(frozen=True)
class NumberTable(Rule):
    """A number for each of `keys`."""

    keys: tuple[str, ...]
    rule: Range

    def check(self, setting: str, value: object) -> None:
        table = value if isinstance(value, dict) else {}
        allowed = "a number for each of " + ", ".join(self.keys)
        check(set(table) == set(self.keys), setting, ", ".join(map(str, table)), allowed)
        for key, number in table.items():
            self.rule.check(f"{setting}.{key}", number)


def number(default: Number, low: float, high: float, ends: str = "[]", note: str = "") -> Number:
    """A field for a number within the range; see Range."""
    return field(default=default, metadata={RULE: Range(low, high, ends, note)})


def env_number(
    default: float, low: float, high: float, ends: str = "[]", note: str = ""
) -> EnvNumber:
    """A field for a number within the range, or for a list that gives each env its own."""
    return field(default=default, metadata={RULE: EnvRange(low, high, ends, note)})


def env_numbers(value: EnvNumber) -> tuple[float, ...]:
    """The numbers of a setting: env i takes number i, modulo how many there are.

    Raises ValueError for a text that is no list of numbers.
    """
    if not isinstance(value, str):
        return (float(value),)
    found = LIST_PATTERN.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"{value} is no list")
    return tuple(map(float, found[1].split(",")))


def weight(default: float) -> float:
    """A field for a weight, a threshold or a penalty that is not negative."""
    return number(default, 0, WEIGHT)


def signed(default: float) -> float:
    """A field for a weight or a term of either sign."""
    return number(default, -WEIGHT, WEIGHT)


def word(default: str, rule: TextPattern = FOLDER) -> str:
    """A field for a word of a pattern; without one it must be able to name a folder."""
    return field(default=default, metadata={RULE: rule})


def choice(default: str, words: tuple[str, ...], own: str = "") -> str:
    """A field for one of `words`, or for a user's part of the kind `own`."""
    return field(default=default, metadata={RULE: Choice(words, own)})


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


def _plain(end: float) -> str:
    """1000000 rather than 1e+06."""
    return str(int(end)) if float(end).is_integer() and abs(end) < 1e15 else str(end)
