"""The scaffold ledger: which seed helped which, and the credit that is due when the helped one becomes a fossil.

Given the pair interactions of each env-step; the step records them after its measurements, and the reward settles
them at fossilisation. A fossil is never fossilised again, so nothing has to be removed from the ledger.
"""

import torch
from torch import Tensor

from esper_soa.env.config import PBRS_GAMMA
from esper_soa.state import LEDGER_FLOAT, Attribution, EnvState

HINDSIGHT_WEIGHT = 0.1
HINDSIGHT_CAP = 0.2  # per fossilisation
HINDSIGHT_SLOPE = 0.1


def empty_boosts(num_envs: int, num_slots: int, max_steps: int, device: torch.device) -> Tensor:
    """Ledger at the start of an episode: float64 [N, S, S, T], by scaffold, beneficiary and env-step."""
    return torch.zeros(num_envs, num_slots, num_slots, max_steps, dtype=LEDGER_FLOAT, device=device)


def record_boosts(state: EnvState, attribution: Attribution) -> EnvState:
    """Write this env-step's positive pair interactions; each is a boost in both directions."""
    slot = (state.signals.step - 1).clamp(min=0).view(-1, 1, 1, 1)
    boost = attribution.pair_boost.unsqueeze(3)
    return state.replace(boosts=state.boosts.scatter(3, slot.expand_as(boost), boost))


def received_boosts(boosts: Tensor, beneficiary: Tensor) -> Tensor:
    """Boosts that one slot per env received, [N, S, T] by scaffold and env-step; beneficiary: int64 [N]."""
    num_envs, num_slots, _, num_steps = boosts.shape
    index = beneficiary.view(num_envs, 1, 1, 1).expand(num_envs, num_slots, 1, num_steps)
    return boosts.gather(2, index).squeeze(2)


def credit_for_boost(boost: Tensor, improvement: Tensor, weight: float = HINDSIGHT_WEIGHT) -> Tensor:
    """Credit for one boost to a seed that went on to gain `improvement` points: 0 unless both are positive."""
    return weight * torch.tanh(HINDSIGHT_SLOPE * boost.clamp(min=0) * improvement.clamp(min=0))


def hindsight_credit(received: Tensor, improvement: Tensor, step: Tensor) -> Tensor:
    """Credit [N] for all boosts [N, S, T] to a seed that is fossilised at env-step `step` [N]: discounted, capped.

    A boost at env-step t counts PBRS_GAMMA ** (step - t).
    """
    when = torch.arange(1, received.shape[2] + 1, device=received.device, dtype=LEDGER_FLOAT)
    credit = credit_for_boost(received, improvement.view(-1, 1, 1)).sum(1) * torch.pow(PBRS_GAMMA, -when)
    return (credit.sum(1) * torch.pow(PBRS_GAMMA, step.to(LEDGER_FLOAT))).clamp(max=HINDSIGHT_CAP)
