"""The losses of proximal policy optimisation over eight action heads, as pure functions of tensors.

Heads are the last axis, in HEADS order; all other axes are env-steps, in any shape. Masks are bool and choose the
env-steps that count, so that padding never enters a mean. Where the env-steps are shared out over processes, `total`
sums over them (Ranks.total), and every mean is that over all. Called by the learner.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

MAX_HEAD_LOG_RATIO = 20.0
MAX_JOINT_LOG_RATIO = 30.0


Total: TypeAlias = Callable[..., tuple[Tensor, ...]]  # the sums over all processes of what each has


def whole(*parts: Tensor) -> tuple[Tensor, ...]:
    """Sums over this process alone."""
    return parts


class RatioStats(NamedTuple):
    """How far the policy has moved from the one that acted."""

    kl: Tensor  # []
    clip_fraction: Tensor  # [], of the joint ratio
    highest: Tensor  # [], of the joint ratio, in this process alone; -inf for no env-step
    lowest: Tensor  # [], likewise; inf
    head_kl: Tensor  # [8]
    head_clip_fraction: Tensor  # [8]


def masked_mean(x: Tensor, mask: Tensor, total: Total = whole) -> Tensor:
    """Mean [8] of x [..., 8] over the env-steps of mask [..., 8], per head; 0 for none."""
    steps = tuple(range(x.ndim - 1))
    counted, count = total(torch.where(mask, x, 0.0).sum(steps), mask.sum(steps))
    return counted / count.clamp(min=1)


def weighted_mean(x: Tensor, weight: Tensor, total: Total = whole) -> Tensor:
    """Sum of weight * x over the sum of weight (at least 1), where weight is above 0; both [...]."""
    counted, weights = total(torch.where(weight > 0, weight * x, 0.0).sum(), weight.sum())
    return counted / weights.clamp(min=1)


def largest(x: Tensor) -> Tensor:
    """The largest [] of x, -inf for none."""
    return torch.cat([x.flatten(), x.new_full((1,), -torch.inf)]).amax()


def clamped_log_ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Log of new over old probability per head [..., 8], within +-20."""
    return (log_probs - reference).clamp(-MAX_HEAD_LOG_RATIO, MAX_HEAD_LOG_RATIO)


def ratio_stats(log_ratio: Tensor, relevant: Tensor, valid: Tensor, clip: float, total: Total = whole) -> RatioStats:
    """Divergence and clipping of log_ratio [..., 8].

    relevant: bool [..., 8], heads that mattered, on valid env-steps only; valid: bool [...]. The divergence per head is
    Schulman's estimator (r - 1) - log r, and heads are averaged with the share of env-steps on which they mattered.
    """
    kl = masked_mean(torch.expm1(log_ratio) - log_ratio, relevant, total)
    mattered, count = total(relevant.sum(tuple(range(relevant.ndim - 1))), valid.sum())
    share = mattered / count.clamp(min=1)
    joint = log_ratio.sum(-1).clamp(-MAX_JOINT_LOG_RATIO, MAX_JOINT_LOG_RATIO).exp()
    clipped = (log_ratio.exp() - 1).abs() > clip
    counted = torch.where(valid, joint, 1.0)
    return RatioStats(
        kl=(share * kl).sum() / share.sum().clamp(min=1e-8),
        clip_fraction=weighted_mean(((joint - 1).abs() > clip).float(), valid.float(), total),
        highest=largest(counted),
        lowest=-largest(-counted),
        head_kl=kl,
        head_clip_fraction=masked_mean(clipped.float(), relevant, total),
    )


def policy_loss(log_ratio: Tensor, advantages: Tensor, counted: Tensor, clip: float, total: Total = whole) -> Tensor:
    """Clipped surrogate (Schulman et al. 2017), the sum over heads of the mean over each head's own env-steps.

    advantages: [...]; counted: bool [..., 8], heads that mattered on env-steps with a choice.
    """
    ratio = log_ratio.exp()
    gain = advantages.unsqueeze(-1)
    return -masked_mean(torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain), counted, total).sum()


def value_loss(predicted: Tensor, target: Tensor, weight: Tensor, total: Total = whole) -> Tensor:
    """Half the weighted mean squared error."""
    return 0.5 * weighted_mean((predicted - target).square(), weight, total)


def entropy_loss(entropies: Tensor, counted: Tensor, multiplier: Tensor, total: Total = whole) -> Tensor:
    """Minus the mean entropy of each head over its own env-steps, summed with multiplier [8]."""
    return -(multiplier * masked_mean(entropies, counted, total)).sum()


def floor_penalty(entropies: Tensor, available: Tensor, floor: Tensor, weight: Tensor, total: Total = whole) -> Tensor:
    """Sum over heads of weight * (shortfall of the mean entropy below floor) squared; floor, weight [8].

    available: bool [..., 8], heads that some legal op would have made matter; a head that never was is left out.
    """
    shortfall = (floor - masked_mean(entropies, available, total)).clamp(min=0)
    (times,) = total(available.flatten(0, -2).sum(0))
    return (weight * torch.where(times > 0, shortfall.square(), 0.0)).sum()


def contribution_loss(predicted: Tensor, target: Tensor, measured: Tensor, clip: float, total: Total = whole) -> Tensor:
    """Mean squared error [...] over the measured entries, targets within +-clip percent points."""
    error = predicted - target.clamp(-clip, clip)
    squares, count = total(torch.where(measured, error.square(), 0.0).sum(), measured.sum())
    return squares / count.clamp(min=1)


def explained_variance(predicted: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """1 - Var(returns - predicted) / max(Var(returns), 1) over the valid env-steps, sample variances."""
    return 1 - _variance(returns - predicted, valid) / _variance(returns, valid).clamp(min=1.0)


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    count = valid.sum()
    mean = torch.where(valid, x, 0.0).sum() / count.clamp(min=1)
    return torch.where(valid, x - mean, 0.0).square().sum() / (count - 1).clamp(min=1)


def ramp(progress: int, length: int, start: float, end: float) -> float:
    """Linear from start to end over `length` updates, then end; end at once for length 0."""
    return end if length == 0 else start + min(1.0, progress / length) * (end - start)


def penalty_schedule(progress: int, total: int) -> float:
    """Weight of the floor penalty: 1.5 in the first quarter of a run, 1 until three quarters, then down to 0.5."""
    share = min(1.0, max(0.0, progress / max(1, total)))
    if share < 0.25:
        return 1.5
    return 1.0 - 0.5 * max(0.0, (share - 0.75) / 0.25)


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm [] over several tensors."""
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def scale_for_clip(norm: Tensor, limit: float) -> Tensor:
    """Factor [] that brings a gradient of `norm` within `limit`; 1 for limit 0."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else torch.ones_like(norm)


def head_tensor(table: dict[str, float], names: tuple[str, ...], device: torch.device) -> Tensor:
    """float32 [8]: a per-head setting in HEADS order."""
    return torch.tensor([table[name] for name in names], device=device)
