"""Running statistics that bring observations, rewards and returns to unit scale.

States are small tuples of tensors and functions return new ones. Every batch comes with a bool mask
of valid rows; the other rows have no effect, even if they are NaN.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.reduction import ALL_ENVS, Reduction

OBSERVATION_PRIOR = 1e-4  # rows that the initial mean 0 and variance 1 stand for
VARIANCE_EPSILON = 1e-4
REWARD_EPSILON = 1e-8  # smallest standard deviation of rewards
MIN_RETURNS = 32  # returns seen before the value scale is used
VALUE_MOMENTUM = 0.99


class Moments(NamedTuple):
    """Mean, population variance and number of the samples."""

    mean: Tensor  # [F] or []
    var: Tensor  # [F] or []
    seen: Tensor  # []


class RewardStats(NamedTuple):
    """Welford sums of raw rewards, float64 scalars."""

    mean: Tensor
    squares: Tensor  # sum of squared deviations from the mean
    seen: Tensor


def observation_moments(num_features: int, device: torch.device) -> Moments:
    """Mean 0 and variance 1, float32 [num_features]."""
    zeros = torch.zeros(num_features, device=device)
    return Moments(zeros, torch.ones_like(zeros), torch.full((), OBSERVATION_PRIOR, device=device))


def value_moments(device: torch.device) -> Moments:
    """Mean 0, variance 1, nothing seen; float64 scalars."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return Moments(zero, torch.ones_like(zero), zero.clone())


def reward_stats(device: torch.device) -> RewardStats:
    """Nothing seen."""
    return RewardStats(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)))


def batch_moments(rows: Tensor, valid: Tensor) -> Moments:
    """Mean, population variance and number of the rows [B, ...] where valid [B]; all 0 for none."""
    mask = valid.reshape(-1, *[1] * (rows.ndim - 1))
    count = valid.sum().to(rows.dtype)
    divisor = count.clamp(min=1)
    mean = torch.where(mask, rows, 0.0).sum(0) / divisor
    var = torch.where(mask, rows - mean, 0.0).square().sum(0) / divisor
    return Moments(mean, var, count)


def merge(old: Moments, batch: Moments) -> Moments:
    """Moments of the union (Chan, Golub and LeVeque 1979); a batch of none changes nothing."""
    total = old.seen + batch.seen
    share = batch.seen / total.clamp(min=1)
    delta = batch.mean - old.mean
    var = old.var * (1 - share) + batch.var * share + delta.square() * share * (1 - share)
    return Moments(old.mean + delta * share, var, total)


def merge_moving(old: Moments, batch: Moments, momentum: float) -> Moments:
    """Exponential moments: the batch gets the weight 1 - momentum; count 0 changes nothing."""
    weight = 1 - momentum
    delta = batch.mean - old.mean
    var = momentum * old.var + weight * batch.var + momentum * weight * delta.square()
    some = batch.seen > 0
    mean = torch.where(some, momentum * old.mean + weight * batch.mean, old.mean)
    return Moments(mean, torch.where(some, var, old.var), old.seen + batch.seen)


def normalize_observation(moments: Moments, features: Tensor, clip: float) -> Tensor:
    """Features [..., F] less their mean, over their standard deviation, within +-clip."""
    return ((features - moments.mean) / (moments.var + VARIANCE_EPSILON).sqrt()).clamp(-clip, clip)


def update_observation(
    moments: Moments,
    rollouts: Sequence[tuple[Tensor, Tensor]],
    momentum: float,
    reduction: Reduction = ALL_ENVS,
) -> Moments:
    """Moments after rollouts: raw features [T, n, F], and where valid [T, n]; over all envs."""
    batches = [batch_moments(rows.flatten(0, 1), valid.flatten()) for rows, valid in rollouts]
    gathered = (map(Moments, *map(reduction.all_gather, batch)) for batch in batches)
    pooled, *others = (part for batch in gathered for part in batch)
    for other in others:
        pooled = merge(pooled, other)
    return merge_moving(moments, pooled, momentum)


def update_reward(stats: RewardStats, rewards: Tensor, valid: Tensor) -> RewardStats:
    """After raw rewards float64 [N] of an env-step, merged as one: env order cannot matter."""
    batch = batch_moments(rewards, valid)
    total = stats.seen + batch.seen
    share = batch.seen / total.clamp(min=1)
    delta = batch.mean - stats.mean
    squares = stats.squares + batch.var * batch.seen + delta.square() * stats.seen * share
    return RewardStats(stats.mean + delta * share, squares, total)


def normalize_reward(stats: RewardStats, rewards: Tensor, clip: float) -> Tensor:
    """Rewards float64 [N] over `reward_scale`, within +-clip; what is not finite stays so."""
    return (rewards / reward_scale(stats)).clamp(-clip, clip)


def reward_scale(stats: RewardStats) -> Tensor:
    """Raw reward per normalised one, float64 []: their sample deviation, 1 until two were seen."""
    deviation = (stats.squares / (stats.seen - 1).clamp(min=1)).sqrt().clamp(min=REWARD_EPSILON)
    return torch.where(stats.seen < 2, 1.0, deviation)


def update_value(moments: Moments, returns: Tensor, valid: Tensor) -> Moments:
    """Moments after raw returns [...]: exact for MIN_RETURNS, then exponential (VALUE_MOMENTUM)."""
    batch = batch_moments(returns.double().flatten(), valid.flatten())
    exact = merge(moments, batch)
    moving = merge_moving(moments, batch, VALUE_MOMENTUM)
    early = moments.seen < MIN_RETURNS
    mean = torch.where(early, exact.mean, moving.mean)
    return Moments(mean, torch.where(early, exact.var, moving.var), exact.seen)


def value_scale(moments: Moments) -> Tensor:
    """Raw return per unit of value, float64 []: the deviation, 1 until MIN_RETURNS were seen."""
    return torch.where(moments.seen < MIN_RETURNS, 1.0, (moments.var + VARIANCE_EPSILON).sqrt())
