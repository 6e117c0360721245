"""The scaffold boosts: which seed helped which, and the credit that is due when the helped one
becomes a fossil.

Given the pair interactions of each env-step; the step records them after its measurements, and the
reward settles them at fossilisation. A fossil is never fossilised again, so nothing has to be
removed from them.
"""

import torch
from torch import Tensor

from esper_soa.env.config import PBRS_GAMMA
from esper_soa.state import STATE_FLOAT, Attribution, EnvState

HINDSIGHT_WEIGHT = 0.1
HINDSIGHT_CAP = 0.2  # per fossilisation
HINDSIGHT_SLOPE = 0.1


def pairs(num_slots: int) -> list[tuple[int, int]]:
    """The P = S (S - 1) / 2 pairs of slots, in the order of the boosts."""
    return [(low, high) for low in range(num_slots) for high in range(low + 1, num_slots)]


def record_boosts(state: EnvState, attribution: Attribution) -> EnvState:
    """Write this env-step's positive pair interactions."""
    num_slots = attribution.pair_boost.shape[2]
    if num_slots < 2:
        return state
    boost = torch.stack([attribution.pair_boost[:, low, high] for low, high in pairs(num_slots)], 1)
    boost = boost.to(state.boosts.dtype).unsqueeze(2)
    place = (state.signals.step - 1).clamp(min=0).view(-1, 1, 1)
    return state.replace(boosts=state.boosts.scatter(2, place.expand_as(boost), boost))


def hindsight_credit(
    boosts: Tensor, beneficiary: Tensor, improvement: Tensor, step: Tensor
) -> Tensor:
    """Credit float64 [N] for all boosts to the seeds in `beneficiary` (bool [N, S]), fossilised at
    env-step `step` [N].

    A positive boost at env-step t to a seed that went on to gain `improvement` [N] points, if that
    is positive, counts HINDSIGHT_WEIGHT * tanh(HINDSIGHT_SLOPE * boost * improvement) * PBRS_GAMMA
    ** (step - t); the sum is capped. Pairs without the beneficiary are masked, not left out: that
    is one pass over the boosts.
    """
    num_slots = beneficiary.shape[1]
    if num_slots < 2:
        return torch.zeros_like(improvement)
    helped = torch.stack(
        [beneficiary[:, low] | beneficiary[:, high] for low, high in pairs(num_slots)], 1
    )
    gain = (HINDSIGHT_SLOPE * improvement.clamp(min=0)).unsqueeze(1)
    scale = torch.where(helped, gain, 0.0).to(boosts.dtype).unsqueeze(2)
    # A running product is computed once; a power would be fused into the pass over the boosts and
    # cost more than it.
    growth = torch.full(boosts.shape[2:], 1 / PBRS_GAMMA, dtype=STATE_FLOAT, device=boosts.device)
    weight = (HINDSIGHT_WEIGHT * growth.cumprod(0)).to(boosts.dtype)
    # tanh(x) by the logistic function: a third of the time, exact at 0, else off by rounding.
    credit = ((2 * torch.sigmoid(boosts * (2 * scale)) - 1) * weight).sum((1, 2)).to(STATE_FLOAT)
    return (credit * torch.pow(PBRS_GAMMA, step.to(STATE_FLOAT))).clamp(max=HINDSIGHT_CAP)
