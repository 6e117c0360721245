"""Gates: which seed passes which gate, permissive and strict, and the scores."""

import pytest
import torch

from esper_soa.env.config import GatesConfig
from esper_soa.env.gates import check_gates
from esper_soa.env.lifecycle import empty_slots, idle_ramp
from esper_soa.vocabulary import AlphaMode, Stage

PERMISSIVE = GatesConfig(permissive=True)
STRICT = GatesConfig(permissive=False)
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


def one_slot(**fields):
    slots = empty_slots(1, 1, "cpu")
    return slots.replace(**{k: torch.full_like(getattr(slots, k), v) for k, v in fields.items()})


def one_ramp(**fields):
    ramp = idle_ramp(1, 1, "cpu")
    return ramp.replace(**{k: torch.full_like(getattr(ramp, k), v) for k, v in fields.items()})


def verdict(gate, cfg, slots=None, ramp=None):
    slots = one_slot() if slots is None else slots
    results = check_gates(slots, one_ramp() if ramp is None else ramp, cfg)
    return getattr(results, gate).item()


def test_g1_asks_only_for_a_germinated_seed():
    assert verdict("g1", STRICT, one_slot(stage=Stage.GERMINATED))
    assert not verdict("g1", PERMISSIVE, one_slot(stage=Stage.TRAINING))


@pytest.mark.parametrize(
    ("change", "permissive", "strict"),
    [
        ({}, True, True),
        ({"stage_age": 9}, False, False),
        ({"gradient_measured": False}, False, True),
        ({"gradient_health": 0.69}, False, True),
        ({"gradient_exploding": True}, False, True),
        ({"gradient_ratio_known": False}, True, False),
        ({"gradient_ratio": 0.09}, True, False),
        ({"accuracy_current": 60.9}, True, False),  # 0.4 points gained
    ],
)
def test_g2_asks_for_health_when_permissive_and_for_learning_when_strict(
    change, permissive, strict
):
    seed = one_slot(**(LEARNER | change))
    assert verdict("g2", PERMISSIVE, seed) == permissive
    assert verdict("g2", STRICT, seed) == strict


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),
        ({"target": 0.7, "alpha": 0.7}, False),  # at rest, but below full
        ({"mode": AlphaMode.UP}, False),
        ({"alpha": 0.99}, False),
        ({"alpha": 1 - 5e-7}, True),
        ({"alpha": 1 - 0.99e-6}, True),
        ({"alpha": 1 - 1.01e-6}, False),
    ],
)
def test_g3_asks_for_a_ramp_at_rest_at_full_alpha(change, passes):
    ramp = one_ramp(**({"alpha": 1.0, "target": 1.0, "mode": AlphaMode.HOLD} | change))
    assert verdict("g3", PERMISSIVE, one_slot(stage_age=0), ramp) == passes
    assert verdict("g3", STRICT, one_slot(stage_age=10), ramp) == passes
    assert not verdict("g3", STRICT, one_slot(stage_age=9), ramp)


def test_g5_takes_any_measured_contribution_when_permissive_and_one_point_when_strict():
    for contribution, strict in ((-5.0, False), (0.99, False), (1.0, True)):
        seed = one_slot(contribution=contribution, contribution_known=True)
        assert verdict("g5", PERMISSIVE, seed)
        assert verdict("g5", STRICT, seed) == strict
    for cfg in (PERMISSIVE, STRICT):
        assert not verdict("g5", cfg, one_slot(contribution=5.0, contribution_known=False))


def test_thresholds_are_settings():
    assert verdict(
        "g2", GatesConfig(min_blending_steps=3), one_slot(**(LEARNER | {"stage_age": 3}))
    )
    assert not verdict("g2", GatesConfig(min_gradient_health=0.8), one_slot(**LEARNER))


@pytest.mark.parametrize(
    ("fields", "score"),
    [
        ({"accuracy_current": 52.0, "accuracy_stage_start": 50.0}, 0.4),  # 2 of 5 points
        ({"accuracy_current": 60.0, "accuracy_stage_start": 50.0}, 1.0),
        ({"accuracy_current": 49.0, "accuracy_stage_start": 50.0}, 0.0),
    ],
)
def test_the_score_of_g2_is_the_share_of_five_points_gained(fields, score):
    assert verdict("score2", PERMISSIVE, one_slot(**fields)) == pytest.approx(score)


@pytest.mark.parametrize(("contribution", "score"), [(2.5, 0.25), (30.0, 1.0), (-3.0, 0.0)])
def test_the_score_of_g5_is_the_share_of_ten_points_contributed(contribution, score):
    assert (
        verdict("score5", PERMISSIVE, one_slot(contribution=contribution, contribution_known=True))
        == score
    )
    assert (
        verdict("score5", PERMISSIVE, one_slot(contribution=contribution, contribution_known=False))
        == 0.0
    )


def test_the_other_scores_are_germination_and_alpha():
    assert verdict("score1", PERMISSIVE, one_slot(stage=Stage.GERMINATED)) == 1.0
    assert verdict("score3", PERMISSIVE, ramp=one_ramp(alpha=0.3)) == 0.3
