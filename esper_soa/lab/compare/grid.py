"""Values of settings that a study tries, and how a grid is widened. Needs no torch."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import product

from esper_soa.config.env import ENV_SETTINGS
from esper_soa.config.ranges import LIST_PATTERN, MAX_ITEMS
from esper_soa.system.errors import check
from esper_soa.training.results.verdict import Configuration

GEOMETRIC = re.compile(r"log\(([^,()]+),([^,()]+)\)")
FACTOR = 2.0  # between neighbours of log(a,b)

# By name of a setting that can differ by env, its values in the order given.
Grid = Mapping[str, tuple[float | str, ...]]


def grid_of(text: str) -> dict[str, tuple[float | str, ...]]:
    """The grid that tune= describes: settings with a list or with log(a,b); raises UserError."""
    grid = {}
    for word in text.split():
        name, _, value = word.partition("=")
        words = "settings that can differ by env, such as tune=task.host_lr=[0.02,0.04,0.08]"
        check(name in ENV_SETTINGS, "tune", word, allowed=words)
        values = _values(value)
        words = "a list of two values or more, each once, or log(a,b) with 0 < a < b"
        check(len({*values}) == len(values) > 1, name, value, allowed=words)
        ENV_SETTINGS[name].check(name, f"[{','.join(map(format_value, values))}]")
        grid[name] = values
    check(bool(grid), "tune", text, allowed='settings, such as tune="task.host_lr=[0.02,0.04]"')
    size = math.prod(map(len, grid.values()))
    check(size <= MAX_ITEMS, "tune", text, allowed=f"at most {MAX_ITEMS} combinations, not {size}")
    return grid


def _values(text: str) -> tuple[float | str, ...]:
    if found := GEOMETRIC.fullmatch(text):
        low, high = (_number(bound) for bound in found.groups())
        if not (isinstance(low, float) and isinstance(high, float) and 0 < low < high < math.inf):
            return ()
        count = 1 + math.floor(math.log(high / low, FACTOR) + 1e-9)
        return tuple(low * FACTOR**place for place in range(min(count, MAX_ITEMS + 1)))
    listed = LIST_PATTERN.fullmatch(text)
    return tuple(map(_number, listed[1].split(","))) if listed else ()


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def format_value(value: float | str) -> str:
    """A number to twelve digits, or a word."""
    return value if isinstance(value, str) else f"{value:.12g}"


def configurations_of(grid: Grid) -> list[Configuration]:
    """All combinations of a grid's values."""
    return [tuple(zip(grid, row, strict=True)) for row in product(*grid.values())]


def edges(grid: Grid, best: Configuration) -> dict[str, float]:
    """By setting whose best value is the least or the largest number of a grid, the number that
    continues the grid there by the factor of the two numbers at that end; NaN where the setting
    cannot have it.
    """
    beyond = {}
    for name, value in best:
        numbers = sorted(each for each in grid[name] if isinstance(each, float))
        if len(numbers) < 2 or value not in (numbers[0], numbers[-1]):
            continue
        end, beside = numbers[:2] if value == numbers[0] else numbers[:-3:-1]
        further = _rounded(end * end / beside) if beside else math.nan
        rule = ENV_SETTINGS[name]
        beyond[name] = further if rule.holds(further) and further != end else math.nan
    return beyond


def widened(grid: Grid, ends: Iterable[Mapping[str, float]]) -> dict[str, tuple[float | str, ...]]:
    """The grid with the values beyond its ends, as `edges` gives them, that are numbers."""
    more: dict[str, list[float]] = {name: [] for name in grid}
    for beyond in ends:
        for name, value in beyond.items():
            more[name] += [value] * (not math.isnan(value))
    return {name: tuple(dict.fromkeys([*values, *more[name]])) for name, values in grid.items()}


def _rounded(number: float) -> float:
    return float(f"{number:.12g}")
