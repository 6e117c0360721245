"""User errors: each message names the setting, its value and what is allowed. No torch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from operator import index
from os import PathLike

MAX_VALUE_LENGTH = 200  # characters of a value in a message
RUST_MODULE = "pyo3_runtime"  # of the exceptions that a panic of a library in Rust becomes


def printable(text: str, kept: str = "\n") -> str:
    """`text` with escapes, such as \\x1b, for what a terminal does not just show, but `kept`."""
    shown = (sign if sign.isprintable() or sign in kept else repr(sign)[1:-1] for sign in text)
    return "".join(shown)


def one_line(value: object) -> str:
    """`value` in one line of printable characters, cut where it is long."""
    text = printable(str(value), kept="")
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


def single_line(value: object) -> str:
    """`value` in one line, with single spaces."""
    return " ".join(str(value).split())


def error_text(error: BaseException) -> str:
    """Text of an error, and of what it came after, as where ending a capture failed too."""
    errors = [part for part in (error, error.__context__) if part is not None]
    texts = [f"{type(part).__name__}: {one_line(part)}" for part in errors]
    return f"it fails with {', after '.join(texts)}"


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """A question that names the one of `known` nearest to `name`; "" where none is near."""
    names = list(known)
    near = [word for text in (name, name.lower()) for word in get_close_matches(text, names, 1)]
    return f"Did you mean {before}{near[0]}?" if near else ""


class UserError(Exception):
    """Bad input found before or while building: one clear message, exit status 2, no traceback."""


class SettingError(UserError):
    """A setting has a value that cannot work."""

    def __init__(self, setting: str, value: object, allowed: str, remedy: str = "") -> None:
        # An error is unpickled by a call with its `args`.
        super().__init__(setting, one_line(value), allowed, remedy)

    def __str__(self) -> str:
        setting, value, allowed, remedy = self.args
        return f"{setting}={value or repr('')}: must be {allowed}.{remedy and ' '}{remedy}"


class DataError(UserError):
    """A data file is missing, broken or not trusted."""


@contextmanager
def reading(file: object, error_class: type[UserError], allowed: str) -> Iterator[None]:
    """Raise `error_class`, in one line, for whatever a library raises while `file` is read within.

    allowed: what the file must be. Libraries document few of their errors, and those of Rust panic
    with exceptions that are no Exception.
    """
    try:
        yield
    except error_class:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != RUST_MODULE:
            raise
        kind = "" if isinstance(error, UserError | ValueError) else f"{type(error).__name__}: "
        reason = isinstance(error, OSError) and error.strerror or f"{kind}{single_line(error)}"
        raise error_class(f"{one_line(file)}: must be {allowed} ({one_line(reason)})") from error


class RunMemoryError(Exception):
    """Memory ran out in mid-run: one clear message, exit status 1, no traceback."""


class RankLostError(Exception):
    """One of a run's processes ended early or does not answer: one clear message, exit status 1."""


@dataclass(eq=False)
class PrunedError(Exception):
    """A search stopped the run, as its accuracy was below that of other trials."""

    rounds: int  # rounds that were played
    accuracy: float  # percent, of the last of them

    def __post_init__(self) -> None:
        self.args = (self.rounds, self.accuracy)  # with which it is unpickled

    def __str__(self) -> str:
        return f"pruned after {self.rounds} rounds at {self.accuracy:.2f} % accuracy"


def check(ok: bool, setting: str, value: object, allowed: str, remedy: str = "") -> None:
    """Raise SettingError unless `ok`."""
    if not ok:
        raise SettingError(setting, value, allowed, remedy=remedy)


def whole_number(setting: str, value: object, low: int, high: int) -> int:
    """The int that `value` is, also of numpy; SettingError unless it is from `low` to `high`."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    check(low <= number <= high, setting, value, allowed=f"a whole number from {low} to {high}")
    return number


def check_path(setting: str, value: object) -> None:
    """Raise SettingError unless `value` is a path."""
    check(isinstance(value, str | PathLike), setting, value, allowed="a path")


def check_data(ok: bool, actual: str, allowed: str, remedy: str = "") -> None:
    """Raise DataError, which says what was found and what it must be or have, unless `ok`."""
    if not ok:
        raise DataError(f"{actual}: must {allowed}.{remedy and ' '}{remedy}")


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise SettingError unless `value` is one of `choices`."""
    check(value in choices, setting, value, allowed="one of " + ", ".join(choices))
