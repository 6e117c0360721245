"""docs/metrics.md lists every number of the lines that a run writes, with settings that exist where
one is to be changed; and docs/telemetry.md every column and kind of event.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from esper_soa.config.agent import ImitationConfig, NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import REWARD_TERMS, GatesConfig, RewardConfig
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.env.governor import REASON_NAMES
from esper_soa.lab.telemetry.schema import CONTROL_TABLE, EVENT_KINDS, FULL_LEVEL_TABLES, TABLES
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, OP_NAMES
from tests.builders.tiny_runs import fresh, records, settings

SETTINGS = settings(
    rounds=2,
    steps=12,
    gates=GatesConfig(min_blending_steps=1),
    policy=PolicyConfig(
        network=NetworkConfig(hidden=8, features=8),
        ppo=PPOConfig(epochs=1, minibatches=1),
        imitation=ImitationConfig(rounds=1, teacher="schedule", epochs=1),
    ),
    reward=RewardConfig(mode="[shaped,net]", rent_weight="[0.5,0.4]"),
)
STANDS_FOR = {
    "<term>": REWARD_TERMS,
    "<op>": OP_NAMES,
    "<blueprint>": BLUEPRINT_NAMES,
    "<reason>": REASON_NAMES,
    "<fate>": ("germinated", "fossilized", "contributing", "pruned", "unfinished"),
    "<head>": HEAD_NAMES,
    "<mode>": SETTINGS.reward.modes,
    "<setting>": SETTINGS.differing,
}
TYPES = {
    "int32": "INTEGER",
    "double": "DOUBLE",
    "float": "FLOAT",
    "bool": "BOOLEAN",
    "string": "VARCHAR",
    "list<element: float not null>": "FLOAT[]",
    "list<element: bool not null>": "BOOLEAN[]",
}  # of files, and of SQL
NULL = " or null"  # ends the type of a column that may be null
DOCS = Path(__file__).parents[3] / "docs"


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The cells of the rows of all tables on a page of docs/, by heading, without code marks."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    heading = ""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ").split(":")[0]
        elif line.startswith("| `"):
            cells = line.replace("`", "")[2:-2].split(" | ")
            found[heading].append([cell.strip() for cell in cells])
    return found


METRICS = tables_of("metrics.md")
ROUND = [row[0] for row in METRICS["metrics.jsonl"]]
EPISODE = [row[0] for row in METRICS["episodes.jsonl"]]


def keys_of(record: dict, prefix: str = "") -> Iterator[str]:
    """The dotted names of all numbers in a line; `update` is looked at by itself."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def spelled_out(names: list[str]) -> set[str]:
    """`names` with all that a placeholder stands for."""
    found = set(names)
    for sign, words in STANDS_FOR.items():
        found |= {name.replace(sign, word) for name in found for word in words}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = RunFolder(tmp_path_factory.mktemp("metrics"))
    fresh(SETTINGS, place.path)
    return place


def test_every_key_of_a_line_is_listed_and_no_other(folder: RunFolder) -> None:
    """Blueprints that were not germinated have none."""
    for file, listed in ((folder.metrics, ROUND), (folder.episodes, EPISODE)):
        written = {"non_finite"}
        for line in records(file):
            written |= set(keys_of({key: value for key, value in line.items() if key != "update"}))
        assert written <= spelled_out(listed)
        assert [name for name in listed if not spelled_out([name]) & written] == []


def test_every_diagnostic_of_an_update_is_listed_with_its_formula(folder: RunFolder) -> None:
    listed = [row[0] for row in METRICS["update"]]
    written = {name for line in records(folder.metrics) for name in line["update"]}
    ours, theirs = ({name.partition("/")[0] for name in names} for names in (written, listed))
    assert ours <= theirs


def test_every_column_and_kind_of_event_is_listed() -> None:
    page = tables_of("telemetry.md")
    types = {f"{name}{null}" for name in TYPES.values() for null in ("", NULL)}
    for table, columns in TABLES.items():
        rows = [*page["Tables"], *page["steps" if table == CONTROL_TABLE else table]]
        listed = [
            (name, row[1])
            for row in rows
            if row[1] in types
            for name in (spelled_out([row[0]]) - {row[0]} or {row[0]})
        ]
        assert sorted(listed) == sorted(
            (column.name, TYPES[str(column.type)] + NULL * column.nullable) for column in columns
        )
        level = "full" if table in FULL_LEVEL_TABLES else "events"
        level = "rounds" if table == "effects" else level
        assert [table, level] in [row[:2] for row in page["Tables"]]
    assert {name for name, _ in page["terms"]} == set(REWARD_TERMS)
    kinds = {row[0]: tuple(row[2].split(", ")) for row in page["events"] if len(row) == 4}
    assert kinds == EVENT_KINDS


def test_settings_that_are_named_exist() -> None:
    known = {*flat_settings(asdict(TrainConfig()))}
    groups = {name.split(".")[0] for name in known if "." in name}
    known |= {name.rpartition(".")[0] for name in known}
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([^`]+)`", page))
    settings = {
        word.rstrip(".")
        for word in told - spelled_out(ROUND)
        if "." in word and word.split(".")[0] in groups
    }
    assert settings
    assert settings <= known
