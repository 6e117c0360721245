"""Action masks against recordings of the reference.

A slot that is not enabled there does not exist here: DORMANT, it allows nothing and blocks nothing.
Left out are rows in which a governor may prune moving seeds, and those whose count of seeds is on
the other side of the limit than that of their slots.
"""

import pytest
import torch

from esper_soa.config.env import LifecycleConfig
from esper_soa.env.masks import action_masks
from esper_soa.state import Ramp, Slots, initial, stage_in
from esper_soa.vocabulary import CNN_BLUEPRINTS, LIVE_STAGES, Stage
from tests.parity.parity_vectors import load

TRANSFORMER_BLUEPRINTS = (2, 3, 8, 9, 10, 11, 12)  # of hosts of text
TOPOLOGIES = torch.zeros(2, 13, dtype=torch.bool)
TOPOLOGIES[0, list(CNN_BLUEPRINTS)] = True
TOPOLOGIES[1, list(TRANSFORMER_BLUEPRINTS)] = True


@pytest.mark.parametrize("automatic", [True, False])
def test_every_mask_equals_the_recording(automatic: bool) -> None:
    rows = {name: torch.from_numpy(array).long() for name, array in load("action_masks").items()}
    enabled = rows["in_slot_enabled"].bool()
    stage = torch.where(rows["in_slot_stage"] < 0, Stage.EMPTY, rows["in_slot_stage"])
    stage = torch.where(enabled, stage, Stage.DORMANT)
    limit = rows["in_max_seeds"]
    ours_full, full = (
        n >= limit for n in (stage_in(stage, LIVE_STAGES).sum(1), rows["in_total_seeds"])
    )
    told = (rows["in_disable_advance"] == automatic) & (rows["in_governor_override"] == 0)
    told &= (limit == 0) | (ours_full == full)
    rows = {name: values[told] for name, values in rows.items()}
    assert len(stage[told]) > 20
    slots = initial(Slots, (len(stage[told]), 6), "cpu").replace(
        stage=stage[told], seed_age=rows["in_slot_age"]
    )
    ramp = initial(Ramp, slots.shape, "cpu").replace(mode=rows["in_slot_alpha_mode"])
    lifecycle = LifecycleConfig(
        auto_forward_g1=automatic, auto_forward_g2=automatic, auto_forward_g3=automatic
    )
    masks = action_masks(
        slots, ramp, TOPOLOGIES[rows["in_topology"]], rows["in_max_seeds"][:, None], lifecycle
    )
    for name in (one.removeprefix("out_") for one in rows if one.startswith("out_")):
        ours = masks.get(name) & enabled[told] if name == "slot" else masks.get(name)
        ours = ours & enabled[told][:, None] if name == "slot_by_op" else ours
        torch.testing.assert_close(
            ours, rows[f"out_{name}"].bool(), msg=lambda text, name=name: f"{name}: {text}"
        )
