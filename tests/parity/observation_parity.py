"""Observations against recordings of the reference's pure feature function."""

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_soa.env.observation import env_features, slot_features
from esper_soa.state import HISTORY, Ramp, Signals, Slots, initial
from esper_soa.vocabulary import Blueprint, Stage
from tests.parity.parity_vectors import columns, load


def filled_in(empty: Slots | Ramp, given: dict[str, Tensor]) -> Slots | Ramp:
    """The record with the given fields."""
    return empty.replace(
        **{
            name: value.nan_to_num(0.0, torch.inf, -torch.inf).to(empty.get(name).dtype)
            for name, value in given.items()
        }
    )


def slots_of(seeds: dict[str, Tensor]) -> Slots:
    empty = seeds["stage"].isnan()
    telemetry = seeds["has_telemetry"] == 1
    return filled_in(
        initial(Slots, empty.shape, "cpu"),
        {
            "stage": torch.where(empty, Stage.EMPTY, seeds["stage"]),
            "blueprint": torch.where(empty, Blueprint.NONE, seeds["blueprint_index"]),
            "alpha": seeds["current_alpha"],
            "contribution": seeds["counterfactual_contribution"].nan_to_num(0.0),
            "contribution_known": ~seeds["epochs_since_counterfactual"].isnan(),
            "contribution_velocity": seeds["contribution_velocity"],
            "tempo": seeds["blend_tempo_epochs"],
            "blend": seeds["alpha_algorithm"],
            "interaction_sum": seeds["interaction_sum"],
            "gradient_measured": telemetry,
            "gradient_norm": torch.where(
                seeds["gradient_norm"].isnan(), 0.0, seeds["gradient_norm"]
            ),
            "gradient_health": seeds["gradient_health"].nan_to_num(0.0),
            "gradient_vanishing": seeds["has_vanishing"] == 1,
            "gradient_exploding": seeds["has_exploding"] == 1,
            "previous_health": seeds["gradient_health_prev"],
            "previous_health_known": ~seeds["gradient_health_prev"].isnan(),
            "stage_age": seeds["epochs_in_current_stage"],
            "seed_age": seeds["epochs_total"],
            "contribution_age": seeds["epochs_since_counterfactual"],
        },
    )


def signals_of(base: dict[str, Tensor], history: Tensor) -> Signals:
    # The recording is oldest first with `history_len` entries, ours ends with the newest.
    count = base["history_len"].long()
    place = torch.arange(-HISTORY, 0) + count[:, None]
    shifted = history.gather(2, place.clamp(min=0)[:, None, :].expand(-1, 2, -1))
    shifted = torch.where((place >= 0)[:, None, :], shifted, 0.0)
    histories = {"loss_history": shifted[:, 0], "accuracy_history": shifted[:, 1]}
    return initial(Signals, (len(count),), "cpu", **histories).replace(
        step=base["epoch"].long(),
        val_loss=base["val_loss"],
        val_accuracy=base["val_accuracy"],
        last_op=base["last_action_op"].long(),
        last_success=base["last_action_success"] == 1,
    )


@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_every_feature_equals_the_recording(num_slots: int) -> None:
    rows = load(f"features_{num_slots}slot")
    lengths = rows["in_max_epochs"]
    for max_steps in np.unique(lengths).tolist():
        chosen = lengths == max_steps
        base = columns(rows["in_base_names"], rows["in_base"][chosen])
        seeds = columns(rows["in_slot_names"], rows["in_slot"][chosen])
        slots = slots_of(seeds)
        ramp = filled_in(
            initial(Ramp, slots.shape, "cpu"),
            {
                "target": seeds["alpha_target"],
                "mode": seeds["alpha_mode"],
                "length": seeds["alpha_steps_total"],
                "done": seeds["alpha_steps_done"],
            },
        )
        signals = signals_of(base, torch.from_numpy(rows["in_history"][chosen]))
        env = env_features(signals, base["history_len"].long(), slots.stage, max_steps)
        left = seeds["time_to_target"].nan_to_num(0.0).long()
        per_slot = slot_features(slots, ramp, seeds["alpha_velocity"], left, max_steps)
        ours = torch.cat((env, per_slot.flatten(1)), 1)
        theirs = torch.from_numpy(rows["out_obs"][chosen])
        assert ours.isfinite().all()
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            slots.blueprint, torch.from_numpy(rows["out_blueprint_indices"][chosen])
        )
