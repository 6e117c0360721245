"""Gates by their settings and tolerances. Recorded verdicts of every gate: tests/parity."""

import pytest

from esper_soa.config.env import GatesConfig
from esper_soa.env.lifecycle import check_gates
from esper_soa.state import Ramp, Slots, initial
from esper_soa.vocabulary import AlphaMode
from tests.builders.env_records import CPU, with_values

FULL = {"alpha": 1.0, "target": 1.0, "mode": AlphaMode.HOLD}


def verdicts(gate: str, seed: dict, ramp: dict | None = None, **cfg: float) -> tuple[bool, bool]:
    """Of one seed, by permissive and by strict gates."""
    slots = with_values(initial(Slots, (1, 1), CPU), **seed)
    ramps = with_values(initial(Ramp, (1, 1), CPU), **(ramp or {}))
    found = (check_gates(slots, ramps, GatesConfig(permissive=how, **cfg)) for how in (True, False))
    permissive, strict = (getattr(one, gate).item() for one in found)
    return permissive, strict


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


def test_thresholds_are_settings() -> None:
    learner = {"stage_age": 3, "gradient_measured": True, "gradient_health": 0.7}
    learner |= {"gradient_ratio_known": True, "gradient_ratio": 0.1, "accuracy_current": 0.5}
    assert verdicts("g2", learner, min_blending_steps=3) == (True, True)
    assert verdicts("g2", learner, min_blending_steps=4) == (False, False)
    assert verdicts("g3", learner, FULL, min_blending_steps=3) == (True, True)
    nothing = {"min_blending_steps": 3, "min_gradient_health": 0, "min_gradient_ratio": 0}
    unmeasured = learner | {"gradient_measured": False, "gradient_ratio_known": False}
    assert verdicts("g2", learner, **nothing) == (True, True)
    assert verdicts("g2", unmeasured, **nothing) == (False, False)
    strict = {"min_blending_steps": 3, "min_gradient_health": 0.8}
    assert verdicts("g2", learner, **strict) == (False, True)
