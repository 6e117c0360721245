"""Settings of earlier versions: commands and files are told what to do instead, by name."""

from copy import deepcopy
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import yaml

from esper_soa.agent.objective import CONTRIBUTION_CLIP
from esper_soa.agent.scripted import CONSTANTS, RANSOM_CONTRIBUTION, RANSOM_IMPROVEMENT
from esper_soa.config.compose import compose_settings
from esper_soa.config.gone import GONE
from esper_soa.config.settings import (
    TrainConfig,
    flat_settings,
    settings_from_yaml,
    settings_yaml,
)
from esper_soa.env import reward_terms
from esper_soa.system.errors import UserError
from esper_soa.training.loop.resume import check_settings
from esper_soa.training.results import anomalies


def recorded(**changed: object) -> dict:
    """Settings as a run of an earlier version has them; changed: by dotted names, '__' for dots."""
    settings = yaml.safe_load(settings_yaml(TrainConfig()))
    values = {name: gone.value for name, gone in GONE.items()}
    for name, value in (values | {key.replace("__", "."): changed[key] for key in changed}).items():
        *path, last = name.split(".")
        part = settings
        for key in path:
            part = part[key]
        part[last] = deepcopy(value)
    return settings


@pytest.mark.parametrize(
    ("name", "sign"),
    [*((name, "") for name in GONE), ("reward.split", "+"), ("reward.split", "++")],
)
def test_a_command_with_a_setting_that_is_gone_is_told_what_to_do(name: str, sign: str) -> None:
    with pytest.raises(UserError) as error:
        compose_settings("", [f"{sign}{name}=1"])
    assert str(error.value) == f"{name}: this setting is gone. {GONE[name].instead}"


def test_part_of_a_setting_that_is_gone_is_refused_by_the_name_of_the_whole() -> None:
    with pytest.raises(UserError, match=r"^telemetry.anomaly.entropy_collapse: this setting is g"):
        compose_settings("", ["telemetry.anomaly.entropy_collapse.op=0.1"])


def test_nothing_is_both_a_setting_and_gone() -> None:
    assert GONE.keys().isdisjoint(flat_settings(asdict(TrainConfig())))


def test_values_that_are_gone_are_those_that_hold_now() -> None:
    rules = anomalies.ANOMALY_RULES.values()
    limits = [rule.get("above", rule.get("below")) for rule in rules]
    limits.remove("max_lstm_rms")
    limits += [anomalies.MAX_GRADIENT_DRIFT, anomalies.GRADIENT_MOMENTUM, anomalies.MIN_ENTROPY]
    limits += [anomalies.PATIENCE, anomalies.ENTROPY_RECOVERY]
    heuristic = [*CONSTANTS, RANSOM_CONTRIBUTION, RANSOM_IMPROVEMENT]
    terms = [reward_terms.GERMINATE_IN_TAKEN_SLOT, reward_terms.FOSSILIZE_BEFORE_HOLDING]
    terms += [reward_terms.PRUNE_OF_FOSSIL]
    found = [gone.value for name, gone in GONE.items() if name != "reward.split"]
    assert found == [*terms, CONTRIBUTION_CLIP, *heuristic, *limits]


def test_a_run_of_an_earlier_version_can_be_read_and_resumed() -> None:
    settings = recorded()
    assert settings_from_yaml(yaml.safe_dump(settings)) == TrainConfig()
    saved = SimpleNamespace(settings=settings, rounds_done=0)
    assert check_settings(saved, TrainConfig()) == []  # type: ignore[arg-type]


def test_modes_of_a_run_of_an_earlier_version_are_read_as_a_list_of_modes() -> None:
    settings = recorded(reward__split=["shaped", "net"])
    assert settings_from_yaml(yaml.safe_dump(settings)).reward.mode == "[shaped,net]"
    saved = SimpleNamespace(settings=settings, rounds_done=0)
    with pytest.raises(UserError) as error:
        check_settings(saved, TrainConfig())  # type: ignore[arg-type]
    told = "resume: the checkpoint has reward.split=['shaped', 'net']. reward.split: this setting "
    assert str(error.value) == f"{told}is gone. {GONE['reward.split'].instead}"


def test_a_run_of_an_earlier_version_with_another_value_is_refused() -> None:
    settings = recorded(policy__heuristic__penalty_decay=0.25)
    told = r"^the run has policy.heuristic.penalty_decay=0.25. policy.heuristic.penalty_decay: this"
    with pytest.raises(UserError, match=told):
        settings_from_yaml(yaml.safe_dump(settings))
    told = r"^resume: the checkpoint has policy.heuristic.penalty_decay=0.25. policy.heuristic"
    saved = SimpleNamespace(settings=settings, rounds_done=0)
    with pytest.raises(UserError, match=told):
        check_settings(saved, TrainConfig())  # type: ignore[arg-type]
