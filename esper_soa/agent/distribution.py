"""Masked categorical distributions of the action heads, in float32, shared by rollout and update.

Logits, masks of legal choices and floors in, log-probabilities, entropies and choices out.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_soa.env.legal import first_choice

MASKED_LOGIT = -1e4  # finite, and its exponential is exactly 0 in float32
MAX_FLOOR_MASS = 0.99  # all floors of a head together take at most this much probability


def side_by_side(heads: Sequence[Tensor]) -> Tensor:
    """[..., K, C] of K heads [..., 1 to C], each with 0 or False behind its own entries."""
    size = max(head.shape[-1] for head in heads)
    padded = [nn.functional.pad(head, (0, size - head.shape[-1])) for head in heads]
    return torch.stack(padded, dim=-2)


def probabilities(log_probs: Tensor) -> Tensor:
    """Their exponentials, as powers of 2: on a CPU torch's `exp` is slow where results are 0."""
    return (log_probs / math.log(2)).exp2()


def masked_log_probs(logits: Tensor, mask: Tensor, floor: float | Tensor) -> Tensor:
    """Log-probabilities float32 [..., C] of the mixture q = (1 - n f) p + f over n legal choices.

    p is the softmax of the legal logits and f = min(floor, 0.99 / n), so that every legal choice
    keeps at least f and every logit its gradient. Illegal choices get MASKED_LOGIT: probability 0.
    """
    legal = torch.where(mask, logits.float(), MASKED_LOGIT).movedim(-1, 0)
    # on a CPU rows of a few numbers are slow, columns are not
    log_probs = torch.log_softmax(legal.contiguous(), dim=0).movedim(0, -1)
    num_legal = mask.sum(-1, keepdim=True, dtype=torch.float32).clamp(min=1)
    mass = (num_legal * floor).clamp(max=MAX_FLOOR_MASS)
    mixed = torch.lerp(probabilities(log_probs), 1 / num_legal, mass).clamp(min=1e-37)
    log_probs = torch.where(mass > 0, mixed.log(), log_probs)
    return torch.where(mask, log_probs, MASKED_LOGIT)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy [...] over the legal choices of log_probs [..., C], over the uniform's; 0 for one."""
    num_legal = mask.sum(-1)
    raw = -torch.where(mask, probabilities(log_probs) * log_probs, 0.0).sum(-1)
    return torch.where(num_legal > 1, raw / num_legal.clamp(min=2).log(), 0.0)


def choose(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Sample int64 [...] from log_probs [..., C]: the inverse of its sums at `noise` in [0, 1).

    A choice of probability 0 is never taken, however the cumulative sums are rounded.
    """
    probs = probabilities(log_probs)
    cumulative = torch.where(probs > 0, probs.cumsum(-1), 0.0)
    bound = noise.clamp(max=1 - 2**-24).unsqueeze(-1) * cumulative.amax(-1, keepdim=True)
    return first_choice(cumulative > bound)
