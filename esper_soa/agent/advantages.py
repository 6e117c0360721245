"""Generalised advantage estimation over a rollout, and the normalisation of advantages."""

import torch
from torch import Tensor

from esper_soa.agent.normalize import batch_moments

STD_FLOOR = 0.1  # keeps the noise of nearly constant advantages from being blown up
STD_EPSILON = 1e-8


def gae(
    rewards: Tensor,
    values: Tensor,
    terminal: Tensor,
    valid: Tensor,
    bootstrap: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, returns, temporal differences [T, N] (Schulman et al. 2016), 0 in invalid rows.

    rewards, values [T, N], in the same unit; terminal, valid bool [T, N]. bootstrap [N] is the
    value after the last valid row: that of the next state where the episode was truncated there,
    0 otherwise. Nothing flows back across a terminal row. gamma and lam may be given per env. Sums
    are taken in float64, as long rollouts with gamma * lam near 1 cancel.
    """
    dtype = values.dtype
    following = bootstrap
    advantage = torch.zeros_like(following)
    advantages = []
    differences = []
    for t in range(rewards.shape[0] - 1, -1, -1):
        flows = (~terminal[t]).double()  # makes what it is multiplied with and added to double
        difference = rewards[t] + gamma * flows * following - values[t]
        current = difference + gamma * lam * flows * advantage
        differences.append(torch.where(valid[t], difference, 0.0))
        advantages.append(torch.where(valid[t], current, 0.0))
        advantage = torch.where(valid[t], current, advantage)
        following = torch.where(valid[t], values[t], following)
    stacked = torch.stack(advantages[::-1])
    returns = torch.where(valid, stacked + values, 0.0)
    return stacked.to(dtype), returns.to(dtype), torch.stack(differences[::-1]).to(dtype)


def normalize_advantages(advantages: Tensor, valid: Tensor) -> Tensor:
    """Advantages less their mean over valid rows, over their population deviation, at least 0.1."""
    moments = batch_moments(advantages.flatten(), valid.flatten())
    scale = moments.var.sqrt().clamp(min=STD_FLOOR) + STD_EPSILON
    return torch.where(valid, (advantages - moments.mean) / scale, 0.0)
