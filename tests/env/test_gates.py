"""Gates: which seed passes which gate, permissive and strict."""

import math

import pytest
from env_records import CPU, with_values

from esper_soa.env.config import GatesConfig
from esper_soa.env.lifecycle import check_gates
from esper_soa.state import Ramp, Slots, initial
from esper_soa.vocabulary import AlphaMode, Stage

LEARNER = {  # a seed in training that passes G2 in both modes: 61 - 60.5 = 0.5 points gained
    "stage_age": 10,
    "gradient_measured": True,
    "gradient_health": 0.7,
    "gradient_exploding": False,
    "gradient_ratio_known": True,
    "gradient_ratio": 0.1,
    "accuracy_current": 61.0,
    "accuracy_stage_start": 60.5,
}
FULL = {"alpha": 1.0, "target": 1.0, "mode": AlphaMode.HOLD}


def verdicts(gate: str, seed: dict, ramp: dict | None = None, **cfg: float) -> tuple[bool, bool]:
    """Of one seed, by permissive and by strict gates."""
    slots = with_values(initial(Slots, (1, 1), CPU), **seed)
    ramps = with_values(initial(Ramp, (1, 1), CPU), **(ramp or {}))
    found = (check_gates(slots, ramps, GatesConfig(permissive=how, **cfg)) for how in (True, False))
    permissive, strict = (getattr(one, gate).item() for one in found)
    return permissive, strict


def test_g1_asks_only_for_a_germinated_seed() -> None:
    assert verdicts("g1", {"stage": Stage.GERMINATED}) == (True, True)
    assert verdicts("g1", {"stage": Stage.TRAINING}) == (False, False)


@pytest.mark.parametrize(
    ("change", "permissive", "strict"),
    [
        ({}, True, True),
        ({"stage_age": 9}, False, False),
        ({"gradient_measured": False}, False, True),
        ({"gradient_health": 0.69}, False, True),
        ({"gradient_exploding": True}, False, True),
        ({"gradient_ratio_known": False}, True, False),
        ({"gradient_ratio": math.nextafter(0.1, 0.0)}, True, False),
        ({"accuracy_current": math.nextafter(61.0, 0.0)}, True, False),
    ],
)
def test_g2_asks_for_health_when_permissive_and_for_learning_when_strict(
    change: dict, permissive: bool, strict: bool
) -> None:
    assert verdicts("g2", LEARNER | change) == (permissive, strict)


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),
        ({"target": 0.7, "alpha": 0.7}, False),  # at rest, but below full
        ({"mode": AlphaMode.UP}, False),
        ({"alpha": 1 - 0.99e-6}, True),
        ({"alpha": 1 - 1.01e-6}, False),
    ],
)
def test_g3_asks_for_a_ramp_at_rest_at_full_alpha(change: dict, passes: bool) -> None:
    for age in (9, 10):
        assert verdicts("g3", {"stage_age": age}, FULL | change) == (passes, passes and age == 10)


@pytest.mark.parametrize(
    ("contribution", "strict"), [(-5.0, False), (math.nextafter(1.0, 0.0), False), (1.0, True)]
)
def test_g5_takes_any_measured_contribution_when_permissive_and_one_point_when_strict(
    contribution: float, strict: bool
) -> None:
    seed = {"contribution": contribution, "contribution_known": True}
    assert verdicts("g5", seed) == (True, strict)
    assert verdicts("g5", seed | {"contribution_known": False}) == (False, False)


def test_thresholds_are_settings() -> None:
    young = LEARNER | {"stage_age": 3}
    assert verdicts("g2", young, min_blending_steps=3) == (True, True)
    assert verdicts("g3", young, FULL, min_blending_steps=3) == (True, True)
    assert verdicts("g2", LEARNER, min_gradient_health=0.8) == (False, True)
