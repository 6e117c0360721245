"""Every number that a run writes is on the page of metrics, with a setting that exists where one is
to be changed.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from esper_soa.agent.config import ImitationConfig, NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.agent.diagnostics import IMITATION, MEANING
from esper_soa.config import ComputeConfig, TelemetryConfig, TrainConfig
from esper_soa.env.config import GatesConfig, RewardConfig
from esper_soa.env.governor import REASON_NAMES
from esper_soa.nets.config import DataConfig, TaskConfig
from esper_soa.ops.rundir import RunFolder
from esper_soa.telemetry.metric_meanings import (
    EPISODE,
    READING,
    ROUND,
    SECTIONS,
    SLOTS_READING,
    STEPS_READING,
)
from esper_soa.telemetry.schema import KEYS, REWARD_TERMS, SLOTS, STEPS, Column
from esper_soa.trainer import run
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, OP_NAMES

SETTINGS = TrainConfig(
    envs=2,
    rounds=2,
    steps=12,
    batch_size=4,
    train_samples=4,
    val_samples=8,
    slots=["r0c0", "r0c1"],
    control="none",
    task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=16),
    gates=GatesConfig(min_blending_steps=1),
    policy=PolicyConfig(
        network=NetworkConfig(hidden=8, features=8),
        ppo=PPOConfig(epochs=1, minibatches=1),
        imitation=ImitationConfig(rounds=1, teacher="schedule", epochs=1),
    ),
    reward=RewardConfig(split=["shaped", "net"]),
    telemetry=TelemetryConfig(progress="off"),
    compute=ComputeConfig(threads=1, workers=1),
)
STANDS_FOR = {
    "<term>": [name for name, _ in REWARD_TERMS],
    "<op>": OP_NAMES,
    "<blueprint>": BLUEPRINT_NAMES,
    "<reason>": REASON_NAMES,
    "<fate>": ("germinated", "fossilized", "contributing", "pruned", "unfinished"),
    "<head>": HEAD_NAMES,
    "<mode>": SETTINGS.reward.split,
}


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
        found |= {
            name.replace(sign, word) for name in list(found) if sign in name for word in words
        }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = RunFolder(tmp_path_factory.mktemp("metrics"))
    run(SETTINGS, place)
    return place


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_key_of_metrics_jsonl_is_listed(folder: RunFolder) -> None:
    listed = spelled_out([metric.name for metric in ROUND])
    for line in lines(folder.metrics):
        update = line.pop("update")
        assert set(keys_of(line)) <= listed
        families = {re.sub("/.*", "", name) for name in update}
        assert families <= {re.sub("/.*", "", name) for name in READING}


def test_every_key_of_episodes_jsonl_is_listed(folder: RunFolder) -> None:
    listed = spelled_out([metric.name for metric in EPISODE])
    for line in lines(folder.episodes):
        assert set(keys_of(line)) <= listed


def test_every_listed_key_is_written(folder: RunFolder) -> None:
    """Else the page would tell of numbers that there are not; blueprints that were not germinated
    have none.
    """
    written = {key for line in lines(folder.metrics) for key in keys_of(line)} | {"non_finite"}
    for metric in ROUND:
        assert spelled_out([metric.name]) & written, metric.name
    written = {key for line in lines(folder.episodes) for key in keys_of(line)} | {"non_finite"}
    for metric in EPISODE:
        assert spelled_out([metric.name]) & written, metric.name


def test_every_diagnostic_of_an_update_can_be_read() -> None:
    assert set(READING) == set(MEANING) | set(IMITATION)


@pytest.mark.parametrize(("columns", "reading"), [(STEPS, STEPS_READING), (SLOTS, SLOTS_READING)])
def test_every_measured_column_is_listed(columns: tuple[Column, ...], reading: dict) -> None:
    chosen = {"success", "tempo", "alpha_target", "alpha_speed", "ops_legal", "panic", "seed"}
    chosen = chosen if columns is STEPS else {"seed"}
    numbers = {
        column.name
        for column in columns
        if column not in KEYS and column.type != "text" and not column.name.endswith("_probability")
    }
    assert numbers - chosen == set(reading)


def test_settings_that_are_named_exist() -> None:
    def flat(part: dict, prefix: str = "") -> Iterator[str]:
        for name, value in part.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")

    known = set(flat(asdict(TrainConfig())))
    groups = {name.split(".")[0] for name in known if "." in name}
    remedies = [metric.remedy for metrics in SECTIONS.values() for metric in metrics]
    told = {word for remedy in remedies for word in re.findall(r"`([^`]+)`", remedy)}
    metrics = spelled_out([metric.name for metric in ROUND])
    settings = {
        word.rstrip(".") for word in told - metrics if "." in word and word.split(".")[0] in groups
    }
    assert settings
    assert settings <= known
