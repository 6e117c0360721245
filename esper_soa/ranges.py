"""Ranges of settings: each stands in the line of its field, and is checked as they are made.

`number(default, low, high)` and its kin give a dataclass field its default and its rule;
`check_fields` applies the rules of one dataclass. Needs no torch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar, cast

from esper_soa.errors import check
from esper_soa.registry import is_reference

RULE = "rule"  # key of a field's metadata
COUNT = 10**9  # most env-steps, rounds, images: sums and products of two stay within int64
# most of a weight, a threshold or a reward term: products of a few stay within float32
WEIGHT = 1e6
MOST_ITEMS = 64  # of a list
NAME_PATTERN = re.compile(r"[\w.+-]{1,60}")

Setting = TypeVar("Setting", int, float)


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
class Choice(Rule):
    """One of several words, or a part of a user's own."""

    words: tuple[str, ...]
    own: str = ""  # the kind of part that may be named instead, as `module:name`; see registry.py

    def holds(self, value: object) -> bool:
        """Whether there is a part of that name is asked while the run is built."""
        return value in self.words or (self.own != "" and is_reference(str(value)))

    def __str__(self) -> str:
        own = f", or module:name of your own {self.own}" if self.own else ""
        return "one of " + ", ".join(self.words) + own


class Name(Rule):
    """A word that can name a folder."""

    def holds(self, value: object) -> bool:
        return NAME_PATTERN.fullmatch(str(value)) is not None and str(value).strip(".") != ""

    def __str__(self) -> str:
        return "a folder name of at most 60 letters, digits, '_', '-', '+' and '.'"


@dataclass(frozen=True)
class Items(Rule):
    """A list of different items that follow a rule, at least `least` of them."""

    rule: Rule
    least: int
    repeated: bool = False  # the same item may occur twice

    def check(self, setting: str, value: object) -> None:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        check(listed, setting, value, "a list")
        items = list(cast(Sequence, value))
        size = f"a list of {self.least} to {MOST_ITEMS} items, each {self.rule}"
        check(self.least <= len(items) <= MOST_ITEMS, setting, value, size)
        for item in items:
            self.rule.check(setting, item)
        different = self.repeated or len(set(items)) == len(items)
        check(different, setting, value, "without repetition")


@dataclass(frozen=True)
class Table(Rule):
    """A number for each of `keys`."""

    keys: tuple[str, ...]
    rule: Range

    def check(self, setting: str, value: object) -> None:
        table = value if isinstance(value, dict) else {}
        allowed = "a number for each of " + ", ".join(self.keys)
        check(set(table) == set(self.keys), setting, ", ".join(map(str, table)), allowed)
        for key, number in table.items():
            self.rule.check(f"{setting}.{key}", number)


def number(default: Setting, low: float, high: float, ends: str = "[]", note: str = "") -> Setting:
    """A field for a number within the range; see Range."""
    return field(default=default, metadata={RULE: Range(low, high, ends, note)})


def word(default: str) -> str:
    """A field for a word that can name a folder."""
    return field(default=default, metadata={RULE: Name()})


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


def numbers(default: Sequence[Setting], low: float, high: float, least: int = 1) -> list[Setting]:
    """A field for a list of numbers within the range."""
    rule = Items(Range(low, high), least, repeated=True)
    return field(default_factory=lambda: list(default), metadata={RULE: rule})


def table(
    default: Callable[[], dict[str, float]], keys: tuple[str, ...], low: float, high: float
) -> dict[str, float]:
    """A field for a number within the range for each of `keys`."""
    return field(default_factory=default, metadata={RULE: Table(keys, Range(low, high))})


def check_fields(path: str, settings: object) -> None:
    """Raise SettingError for the first field of the dataclass whose rule forbids its value."""
    for item in fields(settings):  # type: ignore[arg-type]
        if RULE in item.metadata:
            item.metadata[RULE].check(path + item.name, vars(settings)[item.name])


def _plain(end: float) -> str:
    """1000000 rather than 1e+06."""
    return str(int(end)) if float(end).is_integer() and abs(end) < 1e15 else str(end)
