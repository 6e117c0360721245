"""Trainable parameters in the slots of every env, and what an image costs in training."""

import torch
from torch import Tensor

from esper_soa.state import STATE_FLOAT, Costs, Slots, stage_in
from esper_soa.vocabulary import Blend, Stage

GATE_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


def occupied_params(slots: Slots, counts: Costs) -> Tensor:
    """Parameters of the live seed in each slot, gate included: float64 [N, S], 0 without one."""
    return torch.where(slots.live, _per_slot(slots, counts.seed, counts.gate), 0.0)


def flop_per_image(slots: Slots, costs: Costs) -> Tensor:
    """FLOP of training host, running seeds and their gates on one image: float64 [N]."""
    each = _per_slot(slots, costs.seed, costs.gate)
    return costs.host + torch.where(slots.running, each, 0.0).sum(1)


def _per_slot(slots: Slots, seed: Tensor, gate: Tensor) -> Tensor:
    """`seed` [S, P] of each slot's blueprint, plus `gate` [S] where it has one: float64 [N, S]."""
    rows = seed.to(STATE_FLOAT).unsqueeze(0).expand(slots.stage.shape[0], -1, -1)
    seeds = rows.gather(2, slots.blueprint.clamp(min=0).unsqueeze(2)).squeeze(2)
    gated = (slots.blend == Blend.GATE) & stage_in(slots.stage, GATE_STAGES)
    return seeds + torch.where(gated, gate.to(STATE_FLOAT), 0.0)


def total_params(slots: Slots, counts: Costs) -> Tensor:
    """Parameters of the host and of everything live in its slots: float64 [N]."""
    return counts.host + occupied_params(slots, counts).sum(1)


def fossilized_params(slots: Slots, counts: Costs) -> Tensor:
    """Parameters of the fossils: float64 [N]."""
    fossil = slots.stage == Stage.FOSSILIZED
    return torch.where(fossil, occupied_params(slots, counts), 0.0).sum(1)
