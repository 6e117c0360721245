"""The page on the configuration has every option that ships, and the defaults of the settings."""

import re
from pathlib import Path

import pytest
import yaml

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import flat_settings, settings_yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
MAIN = "cifar_3seed"
SCHEDULE = "policy.schedule."


def tables(first: str) -> list[list[list[str]]]:
    """The tables of the page whose first column has this title: rows of cells, titles first."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    split = [[line.strip("| \n").split(" | ") for line in block.splitlines()] for block in blocks]
    return [[table[0], *table[2:]] for table in split if table[0][0] == first]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def documented(title: str) -> dict[str, object]:
    """The values of the settings in the columns of this title."""
    found = {}
    (schedule,) = tables(f"setting under `{SCHEDULE}`")
    for group, (heads, *rows) in [(SCHEDULE, schedule), *(("", one) for one in tables("setting"))]:
        for row in rows if title in heads else ():
            names = [group + name for name in names_in(row[0])]
            values = row[heads.index(title)].split(", ")
            assert len(names) == len(values), row
            found |= {name: yaml.safe_load(one) for name, one in zip(names, values, strict=True)}
    return found


@pytest.mark.parametrize("group", ["experiment", "task"])
def test_the_page_has_a_row_for_each_option_that_ships(group: str) -> None:
    (table,) = tables(group)
    rows = [names_in(row[0]) for row in table[1:]]
    files = (ROOT / "configs" / group).glob("*.yaml")
    assert sorted(rows) == sorted([path.stem] for path in files)


@pytest.mark.parametrize("group", ["data", "reward", "policy", "gates", "telemetry", "compute"])
def test_the_row_of_a_group_has_its_options(group: str) -> None:
    (table,) = tables("group")
    (row,) = (row for row in table[1:] if group in names_in(row[0]))
    options = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
    assert options <= set(names_in(row[2]))
    assert set(names_in(row[1])) <= options


@pytest.mark.parametrize(("title", "experiment"), [("default", ""), (f"in `{MAIN}`", MAIN)])
def test_the_values_on_the_page_are_those_of_the_settings(title: str, experiment: str) -> None:
    settings = flat_settings(yaml.safe_load(settings_yaml(compose_settings(experiment))))
    found = documented(title)
    assert len(found) > 8
    assert {name: settings[name] for name in found} == found
