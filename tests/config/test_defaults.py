"""Defaults and ranges as numbers/TrainConfig.txt records them, and what follows from settings."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest

from esper_soa.config.env import (
    GUARD_WINDOW,
    MAX_STABLE_WINDOW,
    PBRS_GAMMA,
    EarlyStopConfig,
    LifecycleConfig,
    LossRewardConfig,
    RewardConfig,
)
from esper_soa.config.ranges import RULE, Settings
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from tests.builders.recorded_numbers import assert_recorded_text


def test_constants_of_the_reference_are_kept() -> None:
    assert (PBRS_GAMMA, GUARD_WINDOW, MAX_STABLE_WINDOW) == (0.995, 20, 10)


def lines_of(settings: Settings) -> Iterator[str]:
    """By dotted name, the default of every setting and what is allowed."""
    for item in fields(settings):
        value = vars(settings)[item.name]
        if is_dataclass(value):
            yield from lines_of(value)
        else:
            rule = item.metadata.get(RULE)
            yield f"{settings.path}{item.name} = {value!r}: {rule or type(value).__name__}"


def test_defaults_and_ranges_of_all_settings_are_those_recorded() -> None:
    for settings in (TrainConfig(), EvaluateConfig(checkpoint="runs")):
        assert_recorded_text(type(settings).__name__, "\n".join(lines_of(settings)))


def test_basic_plus_pays_seven_tenths_as_drip_unless_told_otherwise() -> None:
    assert RewardConfig(mode="basic_plus").drip_fraction == 0.7
    assert RewardConfig(mode="basic_plus", drip_fraction=0.25).drip_fraction == 0.25


def test_settings_say_whether_episodes_may_end_early_and_what_differs_by_env() -> None:
    for name in ("patience", "rollbacks", "length"):
        assert EarlyStopConfig(**{name: 1}).enabled
    assert not EarlyStopConfig().enabled
    dear = RewardConfig(rent_weight="[1,2]", loss=LossRewardConfig(compute_rent_weight="[1,2]"))
    assert dear.differing == ("reward.rent_weight", "reward.loss.compute_rent_weight")


@pytest.mark.parametrize("off", ["", "auto_forward_g1", "auto_forward_g2", "auto_forward_g3"])
def test_advance_is_disabled_only_where_every_gate_forwards_by_itself(off: str) -> None:
    cfg = LifecycleConfig(**{f"auto_forward_g{gate}": off[-1:] != str(gate) for gate in (1, 2, 3)})
    assert cfg.advance_disabled == (off == "")
