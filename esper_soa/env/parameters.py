"""How many trainable parameters stand in the slots of every env.

Given the slots and the parameter counts of the host and of what can grow in it; called by the reward (rent) and by
the final table of an episode.
"""

import torch
from torch import Tensor

from esper_soa.state import LEDGER_FLOAT, ParameterCounts, Slots, stage_in
from esper_soa.vocabulary import Blend, Stage

GATE_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


def occupied_params(slots: Slots, counts: ParameterCounts) -> Tensor:
    """Parameters of the live seed in each slot, gate network included: float64 [N, S], 0 without a live seed."""
    table = counts.seed.to(slots.stage.device, LEDGER_FLOAT)
    rows = table.unsqueeze(0).expand(slots.stage.shape[0], -1, -1)
    seed = rows.gather(2, slots.blueprint.clamp(min=0).unsqueeze(2)).squeeze(2)
    gated = (slots.blend == Blend.GATE) & stage_in(slots.stage, GATE_STAGES)
    gate = counts.gate.to(slots.stage.device, LEDGER_FLOAT)
    return torch.where(slots.live, seed + torch.where(gated, gate, 0.0), 0.0)


def total_params(slots: Slots, counts: ParameterCounts) -> Tensor:
    """Parameters of the host and of everything live in its slots: float64 [N]."""
    return counts.host + occupied_params(slots, counts).sum(1)


def fossilized_params(slots: Slots, counts: ParameterCounts) -> Tensor:
    """Parameters of the fossils: float64 [N]."""
    fossil = slots.stage == Stage.FOSSILIZED
    return torch.where(fossil, occupied_params(slots, counts), 0.0).sum(1)
