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
AUTO = "auto"  # stands for what the data has
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
            if isinstance(value, list):
                flat = not any(isinstance(part, list | dict) for part in value)
                check(flat, self.path + item.name, value, allowed="a list of texts or numbers")
            if rule is not None:
                rule.check(self.path + item.name, value)
            if isinstance(rule, EnvRange) and not isinstance(value, str):
                # a union has kept 1 as an int, and 1.0 as a float
                vars(self)[item.name] = int(value) if rule.whole else float(value)

    @classmethod
    def env_rules(cls) -> dict[str, "EnvRange | EnvChoice"]:
        """By dotted name, the rules of the fields that can differ by env."""
        rules = {cls.path + item.name: item.metadata.get(RULE) for item in fields(cls)}  # type: ignore[arg-type]
        return {
            name: rule for name, rule in rules.items() if isinstance(rule, EnvRange | EnvChoice)
        }

    @property
    def differing(self) -> tuple[str, ...]:
        """The dotted names of `env_rules` whose values do differ by env, in parts too."""
        values = {self.path + name: value for name, value in vars(self).items()}
        names = [name for name, rule in self.env_rules().items() if rule.differs(values[name])]
        parts = (part for part in vars(self).values() if isinstance(part, Settings))
        return (*names, *(name for part in parts for name in part.differing))

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
    """A condition on values; its words say what is allowed."""

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
    auto: bool = field(default=False, repr=False)  # whether AUTO is allowed too

    def holds(self, value: object) -> bool:
        if self.auto and value == AUTO:
            return True
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        low = value > self.low if self.ends[0] == "(" else value >= self.low
        return low and (value < self.high if self.ends[1] == ")" else value <= self.high)

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        auto = f"{AUTO}, or " * self.auto
        return f"{auto}in {self.ends[0]}{self.low:.15g}, {self.high:.15g}{self.ends[1]}{note}"


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

    def differs(self, value: EnvNumber) -> bool:
        """Whether envs have different numbers by this value."""
        return isinstance(value, str)

    def numbers(self, value: EnvNumber) -> tuple[float, ...] | EnvDraw:
        """The numbers that envs take in turn, or the range that they draw of."""
        return env_numbers(value, self.whole)

    def named(self, value: EnvNumber, numbers: Sequence[float]) -> Sequence[float | str]:
        """The numbers, by which records name envs that have them."""
        return numbers

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
        for number in numbers[:2] if isinstance(numbers, EnvDraw) else numbers:
            check(self.holds(number), setting, number, allowed=str(self))
        if isinstance(numbers, EnvDraw):
            rises = numbers.low < numbers.high and (numbers.low > 0 or not numbers.log)
            check(rises, setting, value, allowed="a range that rises, of log_uniform from above 0")

    def __str__(self) -> str:
        each = f"a list of at most {MAX_ITEMS} such numbers, of which envs take one in turn"
        drawn = "or uniform(a,b) or log_uniform(a,b), of which they draw"
        return f"{'a whole number ' * self.whole}{super().__str__()}, or {each}, {drawn}"


@dataclass(frozen=True)
class Choice(Rule):
    """One of several words, or a part of a user's own."""

    words: tuple[str, ...]
    part: str = ""  # the kind of part that may be named instead, as `module:name`; see registry.py

    def holds(self, value: object) -> bool:
        """Whether it is allowed; that a user's part exists is checked when the run is built."""
        return value in self.words or (self.part != "" and is_reference(str(value)))

    def __str__(self) -> str:
        part = f", or module:name of your own {self.part}" if self.part else ""
        return "one of " + ", ".join(self.words) + part


@dataclass(frozen=True)
class EnvChoice(Choice):
    """The same, or as text a list of such words, of which envs take one in turn."""

    listed: tuple[str, ...] = ()  # words that a list may have; () = all, and parts of a user's own

    def differs(self, value: str) -> bool:
        """Whether envs have different words by this value."""
        return env_words(value) != (value,)

    def numbers(self, value: EnvNumber) -> tuple[float, ...] | EnvDraw:
        """The places of words among the different words of a list, which envs take in turn."""
        words = env_words(str(value))
        different = [*dict.fromkeys(words)]
        return tuple(float(different.index(word)) for word in words)

    def named(self, value: EnvNumber, numbers: Sequence[float]) -> Sequence[float | str]:
        """The words at these places, by which records name envs that have them."""
        different = [*dict.fromkeys(env_words(str(value)))]
        return [different[int(place)] for place in numbers]

    def holds(self, value: object) -> bool:
        words = env_words(str(value))
        if words == (value,):
            return super().holds(value)
        single = Choice(self.listed or self.words, "" if self.listed else self.part)
        return len(words) <= MAX_ITEMS and all(map(single.holds, words))

    def __str__(self) -> str:
        first, second, *_ = self.listed or self.words
        listed = f" {', '.join(self.listed)}" if self.listed else " these"
        each = f"a list such as [{first},{second}] of at most {MAX_ITEMS} of{listed}"
        return f"{super().__str__()}, or {each}, of which envs take one in turn"


@dataclass(frozen=True)
class ChoiceOrList(Choice):
    """The same, or as text a list of different words, but for the first, which stands alone."""

    def holds(self, value: object) -> bool:
        words = env_words(str(value))
        different = len(set(words)) == len(words) <= MAX_ITEMS
        alone = words == (value,) or self.words[0] not in words
        return alone and different and all(map(super().holds, words))

    def __str__(self) -> str:
        _, second, third, *_ = self.words
        return f"{super().__str__()}, or a list such as [{second},{third}]"


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


def number(
    default: Number, low: float, high: float, ends: str = "[]", note: str = "", auto: bool = False
) -> Number:
    """A field for a number within the range; see Range."""
    return field(default=default, metadata={RULE: Range(low, high, ends, note=note, auto=auto)})


def env_number(
    default: float, low: float, high: float, ends: str = "[]", note: str = ""
) -> EnvNumber:
    """A field for a number within the range, or for what gives each env its own; see EnvNumber."""
    return field(default=default, metadata={RULE: EnvRange(low, high, ends, note=note)})


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


def choice(default: str, words: tuple[str, ...], part: str = "") -> str:
    """A field for one of `words`, or for a user's part of the kind `part`."""
    return field(default=default, metadata={RULE: Choice(words, part)})


def choice_or_list(default: str, words: tuple[str, ...], part: str = "") -> str:
    """A field as of `choice`, or for a list of words; see ChoiceOrList."""
    return field(default=default, metadata={RULE: ChoiceOrList(words, part)})


def env_choice(
    default: str, words: tuple[str, ...], part: str = "", listed: tuple[str, ...] = ()
) -> str:
    """A field as of `choice`, or for a list of words that differ by env; see EnvChoice."""
    return field(default=default, metadata={RULE: EnvChoice(words, part, listed)})


def choices(
    default: Sequence[str],
    words: tuple[str, ...],
    repeated: bool = False,
    part: str = "",
    least: int = 1,
) -> list[str]:
    """A field for a list of at least `least` of what `choice` takes; unlike unless `repeated`."""
    rule = Items(Choice(words, part), least, repeated)
    return field(default_factory=lambda: list(default), metadata={RULE: rule})


def numbers(default: Sequence[Number], low: float, high: float, least: int = 1) -> list[Number]:
    """A field for a list of numbers within the range."""
    rule = Items(Range(low, high), least, repeated=True)
    return field(default_factory=lambda: list(default), metadata={RULE: rule})


def table(default: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """A field for a number within the range for each key of `default`."""
    rule = NumberTable(tuple(default), Range(low, high))
    return field(default_factory=lambda: dict(default), metadata={RULE: rule})
