"""The losses of proximal policy optimisation over eight action heads, as pure functions of tensors.

Heads are the last axis, in HEADS order; all other axes are env-steps. Masks are bool and choose the
env-steps that count. A loss is made of means, which `global_means` puts together over processes.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

MAX_HEAD_LOG_RATIO = 20.0
MAX_JOINT_LOG_RATIO = 30.0
Total: TypeAlias = Callable[..., tuple[Tensor, ...]]  # sums each of its tensors over all processes


class Mean(NamedTuple):
    """A mean, or one per head, of the env-steps of this process or of all."""

    summed: Tensor  # [] or [8]
    weight: Tensor  # [] or [8], of its env-steps, or their number

    @property
    def value(self) -> Tensor:
        """The mean; 0 for none."""
        return self.summed / self.weight.clamp(min=1)


Means: TypeAlias = dict[str, Mean]


def global_means(parts: Sequence[Means], total: Total) -> Means:
    """The means over the env-steps of all processes, from those of rollouts in this one."""
    columns = [reduce(_add_means, [part[name] for part in parts]) for name in parts[0]]
    sums = iter(total(*chain.from_iterable(columns)))
    return {name: Mean(next(sums), next(sums)) for name in parts[0]}


def _add_means(first: Mean, second: Mean) -> Mean:
    return Mean(first.summed + second.summed, first.weight + second.weight)


def mean_where(x: Tensor, mask: Tensor) -> Mean:
    """Mean [8] of x [..., 8] over the env-steps of mask [..., 8], per head."""
    steps = tuple(range(x.ndim - 1))
    return Mean(torch.where(mask, x, 0.0).sum(steps), mask.sum(steps))


def weighted_mean(x: Tensor, weight: Tensor) -> Mean:
    """Sum of weight * x over that of weight (at least 1), where weight is above 0; both [...]."""
    return Mean(torch.where(weight > 0, weight * x, 0.0).sum(), weight.sum())


def largest_of(parts: Sequence[Tensor]) -> Tensor:
    """The largest [] of all numbers in several tensors, -inf for none."""
    least = parts[0].new_full((1,), -torch.inf)
    return torch.cat([least, *map(torch.flatten, parts)]).amax()


def clamped_log_ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Log of new over old probability per head [..., 8], within +-20."""
    return (log_probs - reference).clamp(-MAX_HEAD_LOG_RATIO, MAX_HEAD_LOG_RATIO)


def joint_ratio(log_ratio: Tensor) -> Tensor:
    """New over old probability [...] of actions from log_ratio [..., 8]; logarithm within +-30."""
    return log_ratio.sum(-1).clamp(-MAX_JOINT_LOG_RATIO, MAX_JOINT_LOG_RATIO).exp()


def ratio_means(log_ratio: Tensor, relevant: Tensor, valid: Tensor, clip: float) -> Means:
    """Distance of the policy from the one that acted, from log_ratio [..., 8].

    relevant: bool [..., 8], heads that mattered, on valid env-steps only; valid: bool [...]. `kl`
    [8] is Schulman's estimator (r - 1) - log r, `mattered` [8] the share of env-steps on which a
    head did, `head_clip_fraction` [8] and `clip_fraction` [] the shares of ratios, and of joint
    ratios, beyond the clip.
    """
    clipped_jointly = (joint_ratio(log_ratio) - 1).abs() > clip
    return {
        "kl": mean_where(torch.expm1(log_ratio) - log_ratio, relevant),
        "mattered": head_share(relevant, valid),
        "clip_fraction": weighted_mean(clipped_jointly.float(), valid.float()),
        "head_clip_fraction": mean_where(((log_ratio.exp() - 1).abs() > clip).float(), relevant),
    }


def head_share(relevant: Tensor, valid: Tensor) -> Mean:
    """Share [8] of the env-steps of valid [...] on which a head of relevant [..., 8] counts."""
    return Mean(relevant.flatten(0, -2).sum(0), valid.sum())


def divergence(kl: Tensor, shares: Tensor) -> Tensor:
    """Mean [] of kl [8] over heads, each with the share [8] of env-steps on which it mattered."""
    return (shares * kl).sum() / shares.sum().clamp(min=1e-8)


def surrogate(log_ratio: Tensor, advantages: Tensor, relevant: Tensor, clip: float) -> Mean:
    """Clipped gain [8] (Schulman et al. 2017) of each head, the mean over its relevant env-steps.

    advantages: [...]; relevant: bool [..., 8], heads that mattered on env-steps with a choice.
    """
    ratio = log_ratio.exp()
    gain = advantages.unsqueeze(-1)
    return mean_where(torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain), relevant)


def half_squared_error(predicted: Tensor, target: Tensor, weight: Tensor) -> Mean:
    """Half the weighted mean squared error."""
    return weighted_mean(0.5 * (predicted - target).square(), weight)


def floor_penalty(entropies: Mean, floor: Tensor, weight: Tensor) -> Tensor:
    """Sum over heads of weight * (shortfall of mean entropy below floor)^2; floor, weight [8].

    entropies: over env-steps on which some legal op made the head matter; one without is left out.
    """
    shortfall = (floor - entropies.value).clamp(min=0)
    return (weight * torch.where(entropies.weight > 0, shortfall.square(), 0.0)).sum()


def contribution_error(predicted: Tensor, target: Tensor, measured: Tensor, clip: float) -> Mean:
    """Mean squared error [] over the measured entries, targets within +-clip percent points."""
    error = predicted - target.clamp(-clip, clip)
    return Mean(torch.where(measured, error.square(), 0.0).sum(), measured.sum())


def explained_variance(predicted: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """1 - Var(returns - predicted) / max(Var(returns), 1), sample variances where valid."""
    return 1 - _variance(returns - predicted, valid) / _variance(returns, valid).clamp(min=1.0)


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    count = valid.sum()
    mean = torch.where(valid, x, 0.0).sum() / count.clamp(min=1)
    return torch.where(valid, x - mean, 0.0).square().sum() / (count - 1).clamp(min=1)


def ramp(progress: int, length: int, start: float, end: float) -> float:
    """Linear from start to end over `length` updates, then end; end at once for length 0."""
    return end if length == 0 else start + min(1.0, progress / length) * (end - start)


def penalty_schedule(progress: int, total: int) -> float:
    """Weight of the floor penalty: 1.5 in a run's first quarter, 1 to three quarters, then 0.5."""
    share = min(1.0, progress / total)
    if share < 0.25:
        return 1.5
    return 1.0 - 0.5 * max(0.0, (share - 0.75) / 0.25)


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm [] over several tensors."""
    return torch.stack([gradient.norm() for gradient in gradients]).norm()
