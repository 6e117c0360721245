"""The observation vector: features by name, worked out by hand, and nothing that is not finite."""

import math

import pytest
import torch

from esper_soa.env.observation import feature_names, observe
from esper_soa.state import HISTORY
from esper_soa.vocabulary import AlphaMode, Blend, Op, Stage
from tests.builders.env_records import empty_state, with_values

SLOT_NAMES = ("r0c0", "r0c1")
MAX_STEPS = 20


def named(observation, env=0):
    """Features of one env by name."""
    return dict(zip(feature_names(SLOT_NAMES), observation.features[env].tolist(), strict=True))


def symlog(value):
    return math.copysign(math.log1p(abs(value)), value) / 7


def new_state(num_envs=1, num_slots=2, device="cpu"):
    return empty_state(num_envs, num_slots, MAX_STEPS, torch.device(device))


def with_seed(state, **given):
    """`state` with a seed in slot r0c1 of env 0; r0c0 stays empty."""
    given = {"stage": Stage.TRAINING} | given
    slots = with_values(state.slots, **given)
    first = torch.tensor([[True, False]])
    both = {name: (empty, slots.get(name)) for name, empty in state.slots.items()}
    chosen = {name: torch.where(first, *values) for name, values in both.items()}
    return state.replace(slots=slots.replace(**chosen))


def test_names_and_features_agree_in_number_for_any_number_of_slots():
    for names in (("r0c0",), SLOT_NAMES, tuple(f"r0c{i}" for i in range(6))):
        size = 23 + 31 * len(names)  # of the env, and of each slot
        assert len(set(feature_names(names))) == size
        assert observe(new_state(3, len(names)), MAX_STEPS).features.shape == (3, size)


def test_an_env_feature_block_by_hand():
    state = new_state()
    signals = with_values(
        state.signals,
        step=2,
        val_loss=2.0,
        val_accuracy=40.0,
        loss_history=[0.0] * (HISTORY - 2) + [3.0, 2.0],
        accuracy_history=[0.0] * (HISTORY - 2) + [20.0, 40.0],
        last_op=Op.PRUNE,
        last_success=False,
    )
    seen = named(observe(state.replace(signals=signals), MAX_STEPS))
    expected = {
        "step": 2 / 20,
        "val_loss": symlog(2.0),
        "val_accuracy": 0.4,
        "val_loss_4_ago": -1,
        "val_loss_2_ago": -1,
        "val_loss_1_ago": symlog(3.0),
        "val_loss_0_ago": symlog(2.0),
        "val_accuracy_2_ago": -1,
        "val_accuracy_1_ago": 0.2,
        "val_accuracy_0_ago": 0.4,
        "last_success": 0,
        "last_op_wait": 0,
        "last_op_prune": 1,
        "last_op_advance": 0,
    }
    assert {name: seen[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_an_empty_slot_is_all_zeros_without_a_blueprint():
    state = with_seed(new_state(), alpha=0.3, blueprint=4)
    observation = observe(state, MAX_STEPS)
    seen = named(observation)
    assert all(value == 0 for name, value in seen.items() if name.startswith("r0c0."))
    assert observation.blueprints.tolist() == [[-1, 4]]


def test_a_slot_block_by_hand():
    state = with_seed(
        new_state(),
        stage=Stage.BLENDING,
        stage_age=3,
        seed_age=30,
        tempo=8,
        blend=Blend.MULTIPLY,
        alpha=0.25,
        contribution=-4.0,
        contribution_known=True,
        contribution_velocity=25.0,
        contribution_age=2,
        interaction_sum=1.5,
        gradient_norm=9.0,
        gradient_health=0.6,
        gradient_vanishing=True,
        gradient_measured=True,
        previous_health=0.8,
        previous_health_known=True,
    )
    ramp = with_values(state.ramp, start=0.2, target=0.7, length=5, done=2, mode=AlphaMode.UP)
    state = state.replace(ramp=ramp)
    seen = named(observe(state, MAX_STEPS))
    expected = {
        "active": 1,
        "stage_blending": 1,
        "stage_training": 0,
        "alpha": 0.25,
        "contribution": -0.4,
        "contribution_velocity": 1.0,
        "tempo": 8 / 12,
        "alpha_target": 0.7,
        "alpha_mode": 0.5,
        "ramp_length": 0.25,
        "ramp_done": 0.1,
        "ramp_left": 0.15,
        "alpha_velocity": 0.1,
        "blend": 0.5,
        "interaction_sum": 0.15,
        "gradient_norm": symlog(9.0),
        "gradient_health": 0.6,
        "gradient_vanishing": 1,
        "gradient_exploding": 0,
        "previous_health": 0.8,
        "stage_age": 0.15,
        "contribution_freshness": 0.995**2,
        "seed_age": 1.0,
    }
    assert {name: seen[f"r0c1.{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_seed_that_was_never_measured_is_not_fresh():
    seen = named(observe(with_seed(new_state(), contribution_age=0), MAX_STEPS))
    assert seen["r0c1.contribution_freshness"] == -1
    assert seen["r0c1.previous_health"] == -1
    assert seen["r0c1.gradient_health"] == 0


def test_a_resting_ramp_has_no_velocity():
    state = with_seed(new_state())
    ramp = with_values(state.ramp, target=1.0, length=5)
    assert named(observe(state.replace(ramp=ramp), MAX_STEPS))["r0c1.alpha_velocity"] == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nothing_that_is_not_finite_leaves(broken):
    floats = ("alpha", "contribution", "contribution_velocity", "interaction_sum", "gradient_norm")
    flags = ("gradient_measured", "previous_health_known", "contribution_known")
    values = dict.fromkeys((*floats, "gradient_health", "previous_health"), broken)
    state = with_seed(new_state(), **values, **dict.fromkeys(flags, True))
    names = ("val_loss", "val_accuracy", "loss_history", "accuracy_history")
    signals = with_values(state.signals, step=HISTORY, **dict.fromkeys(names, broken))
    assert observe(state.replace(signals=signals), MAX_STEPS).features.isfinite().all()
