"""The numbers beside the settings that the pages on concepts, rewards and the policy name are their
defaults.
"""

import re
from pathlib import Path

import pytest
import yaml

from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import flat_settings, settings_yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [
    (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("concepts", "rewards", "policy")
]
PAGE = "\n".join(PAGES)
NUMBER = r"(-?\d+(?:\.\d+)?)"
IN_PROSE = (rf"`([a-z_.]+)` \({NUMBER}\)", rf"\(`([a-z_.]+)`, {NUMBER}\)")
BESIDE_FORMULA = rf"\b([a-z_]+)={NUMBER}"


def settings_of(experiment: str) -> dict[str, object]:
    return flat_settings(yaml.safe_load(settings_yaml(compose_settings(experiment))))


def named(text: str, patterns: tuple[str, ...]) -> list[tuple[str, str]]:
    """The settings with their numbers; a name without a dot is of the reward, or of the run."""
    words = " ".join(text.split())
    return [pair for pattern in patterns for pair in re.findall(pattern, words)]


@pytest.mark.parametrize("where", ["prose", "formulas"])
def test_the_numbers_beside_settings_are_their_defaults(where: str) -> None:
    defaults = settings_of("")
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found = (
        named(PAGE, IN_PROSE)
        if where == "prose"
        else [pair for block in blocks for pair in named(block, (BESIDE_FORMULA,))]
    )
    assert len(found) > 20
    for name, number in found:
        full = name if "." in name or name in defaults else f"reward.{name}"
        assert defaults[full] == float(number), name


@pytest.mark.parametrize(("column", "experiment"), [(1, ""), (2, "cifar_3seed")])
def test_the_table_of_the_update_has_the_values_of_the_settings(
    column: int, experiment: str
) -> None:
    settings = settings_of(experiment)
    table = PAGE.split("| setting under `policy.ppo.` |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(rows) > 10
    for row in rows:
        names = re.findall(r"`(\w+)`", row[0])
        values = [float(text) for text in row[column].split(",")]
        assert [settings[f"policy.ppo.{name}"] for name in names] == values
