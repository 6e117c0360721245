"""Observations against recordings of the reference's pure feature function."""

import numpy as np
import pytest
import torch
from parity_vectors import load
from torch import Tensor

from esper_soa.env.observation import env_features, slot_features
from esper_soa.env.signals import initial_signals
from esper_soa.state import HISTORY, Ramp, Signals, Slots
from esper_soa.vocabulary import Blueprint, Stage

INT_FIELDS = {
    "stage",
    "stage_age",
    "seed_age",
    "previous_stage",
    "previous_stage_age",
    "blueprint",
    "blend",
    "style",
    "tempo",
    "contribution_age",
    "length",
    "done",
    "curve",
    "mode",
}


def record(kind: type, shape: tuple[int, ...], given: dict[str, Tensor]) -> Slots | Ramp:
    """A record with the given fields; zeros elsewhere."""
    fields = {}
    for name in kind.__annotations__:
        fields[name] = given.pop(name) if name in given else torch.zeros(shape, dtype=torch.float64)
        if name in INT_FIELDS:
            fields[name] = fields[name].nan_to_num(0.0).long()
    assert not given, f"unknown fields {sorted(given)}"
    return kind(**fields, batch_size=list(shape))


def slots_of(columns: dict[str, Tensor]) -> Slots:
    empty = columns["stage"].isnan()
    telemetry = columns["has_telemetry"] == 1
    return record(
        Slots,
        tuple(empty.shape),
        {
            "stage": torch.where(empty, Stage.EMPTY, columns["stage"]),
            "blueprint": torch.where(empty, Blueprint.NONE, columns["blueprint_index"]),
            "alpha": columns["current_alpha"],
            "contribution": columns["counterfactual_contribution"].nan_to_num(0.0),
            "contribution_known": ~columns["epochs_since_counterfactual"].isnan(),
            "contribution_velocity": columns["contribution_velocity"],
            "tempo": columns["blend_tempo_epochs"],
            "blend": columns["alpha_algorithm"],
            "interaction_sum": columns["interaction_sum"],
            "gradient_measured": telemetry,
            "gradient_norm": torch.where(
                columns["gradient_norm"].isnan(), 0.0, columns["gradient_norm"]
            ),
            "gradient_health": columns["gradient_health"].nan_to_num(0.0),
            "gradient_vanishing": columns["has_vanishing"] == 1,
            "gradient_exploding": columns["has_exploding"] == 1,
            "previous_health": columns["gradient_health_prev"],
            "previous_health_known": ~columns["gradient_health_prev"].isnan(),
            "stage_age": columns["epochs_in_current_stage"],
            "seed_age": columns["epochs_total"],
            "contribution_age": columns["epochs_since_counterfactual"],
        },
    )


def signals_of(base: dict[str, Tensor], history: Tensor) -> Signals:
    # The recording is oldest first with `history_len` entries, ours ends with the newest.
    count = base["history_len"].long()
    place = torch.arange(-HISTORY, 0) + count[:, None]
    shifted = history.gather(2, place.clamp(min=0)[:, None, :].expand(-1, 2, -1))
    shifted = torch.where((place >= 0)[:, None, :], shifted, 0.0)
    return initial_signals(len(count), torch.device("cpu")).replace(
        step=base["epoch"].long(),
        val_loss=base["val_loss"],
        val_accuracy=base["val_accuracy"],
        loss_history=shifted[:, 0],
        accuracy_history=shifted[:, 1],
        last_op=base["last_action_op"].long(),
        last_success=base["last_action_success"] == 1,
    )


@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_every_feature_equals_the_recording(num_slots: int) -> None:
    rows = load(f"features_{num_slots}slot")
    lengths = rows["in_max_epochs"]
    for max_steps in np.unique(lengths).tolist():
        chosen = lengths == max_steps
        base = dict(
            zip(
                rows["in_base_names"].tolist(),
                torch.from_numpy(rows["in_base"][chosen]).unbind(-1),
                strict=True,
            )
        )
        seeds = torch.from_numpy(rows["in_slot"][chosen])
        columns = dict(zip(rows["in_slot_names"].tolist(), seeds.unbind(-1), strict=True))
        slots = slots_of(columns)
        ramp = record(
            Ramp,
            tuple(slots.stage.shape),
            {
                "target": columns["alpha_target"],
                "mode": columns["alpha_mode"],
                "length": columns["alpha_steps_total"],
                "done": columns["alpha_steps_done"],
            },
        )
        signals = signals_of(base, torch.from_numpy(rows["in_history"][chosen]))
        env = env_features(signals, base["history_len"].long(), slots.stage, max_steps)
        left = columns["time_to_target"].nan_to_num(0.0).long()
        per_slot = slot_features(slots, ramp, columns["alpha_velocity"], left, max_steps)
        ours = torch.cat((env, per_slot.flatten(1)), 1)
        theirs = torch.from_numpy(rows["out_obs"][chosen])
        assert ours.isfinite().all()
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            slots.blueprint, torch.from_numpy(rows["out_blueprint_indices"][chosen])
        )
