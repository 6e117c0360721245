"""Masked categorical distributions of the action heads, in float32, shared by rollout and update.

Logits, masks of legal choices and floors in, log-probabilities, entropies and choices out.
"""

import torch
from torch import Tensor

MASKED_LOGIT = -1e4  # finite, and its exponential is exactly 0 in float32
MAX_FLOOR_MASS = 0.99  # all floors of a head together take at most this much probability


def masked_log_probs(logits: Tensor, mask: Tensor, floor: float) -> Tensor:
    """Log-probabilities float32 [..., C] of the mixture q = (1 - n f) p + f over n legal choices.

    p is the softmax of the legal logits and f = min(floor, 0.99 / n), so that every legal choice
    keeps at least f and every logit its gradient. Illegal choices get MASKED_LOGIT: probability 0.
    """
    log_probs = torch.log_softmax(torch.where(mask, logits.float(), MASKED_LOGIT), dim=-1)
    if floor > 0:
        num_legal = mask.sum(-1, keepdim=True)
        share = (MAX_FLOOR_MASS / num_legal).clamp(max=floor)
        log_probs = ((1 - num_legal * share) * log_probs.exp() + share).log()
    return torch.where(mask, log_probs, MASKED_LOGIT)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy [...] over the legal choices of log_probs [..., C], over the uniform's; 0 for one."""
    num_legal = mask.sum(-1)
    raw = -torch.where(mask, log_probs.exp() * log_probs, 0.0).sum(-1)
    return torch.where(num_legal > 1, raw / num_legal.clamp(min=2).log(), 0.0)


def choose(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Sample int64 [...] from log_probs [..., C]: the inverse of its sums at `noise` in [0, 1).

    A choice of probability 0 is never taken, however the cumulative sums are rounded.
    """
    probs = log_probs.exp()
    cumulative = probs.cumsum(-1)
    index = torch.arange(probs.shape[-1], device=probs.device)
    possible = probs > 0
    last = torch.where(possible, index, 0).amax(-1, keepdim=True)
    candidates = possible & (cumulative > noise.unsqueeze(-1) * cumulative[..., -1:])
    return torch.where(candidates | (index == last), index, probs.shape[-1] - 1).amin(-1)
