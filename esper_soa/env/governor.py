"""The loss watch of every env: when a host has lost its way and must go back to its last snapshot.

Given the validation loss of each env-step; `env.step` inspects it after evaluation and before anything is recorded.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.config import GovernorConfig
from esper_soa.state import LEDGER_FLOAT, Guard

WINDOW = 20  # losses remembered
RECOVERED_SHARE = 0.6  # mean loss below this share of the chance loss: the host had learned something
CHANCE_BAND = 0.065  # share of the chance loss within which a loss counts as chance


class PanicReason:
    """What the rule saw in a loss. DIVERGED alone is a panic only after enough of them in a row."""

    NONE = 0
    NOT_FINITE = 1
    COLLAPSED_TO_CHANCE = 2
    DIVERGED = 3


REASON_NAMES = ("none", "not_finite", "collapsed_to_chance", "diverged")


class PanicLimits(NamedTuple):
    """Thresholds of the panic rule; numbers or tensors [N]. Losses in nats."""

    chance_loss: Tensor | float  # of guessing, ln(number of classes)
    sensitivity: Tensor | float  # standard deviations above the mean
    multiplier: Tensor | float  # times the mean
    absolute_threshold: Tensor | float
    min_panics: Tensor | int  # consecutive divergent losses that make a panic
    min_samples: int  # losses before collapse and divergence are judged


def initial_guard(num_envs: int, device: torch.device | str) -> Guard:
    """A guard that has seen nothing yet."""
    return Guard(
        losses=torch.zeros(num_envs, WINDOW, dtype=LEDGER_FLOAT, device=device),
        count=torch.zeros(num_envs, dtype=torch.int64, device=device),
        anomalies=torch.zeros(num_envs, dtype=torch.int64, device=device),
        batch_size=[num_envs],
    )


def inspect(guard: Guard, loss: Tensor, num_classes: int, cfg: GovernorConfig) -> tuple[Guard, Tensor, Tensor]:
    """Judge the validation loss [N] of this env-step: the new guard, panic bool [N], PanicReason int64 [N]."""
    limits = PanicLimits(
        chance_loss=math.log(num_classes),
        sensitivity=cfg.sensitivity,
        multiplier=cfg.multiplier,
        absolute_threshold=cfg.absolute_threshold,
        min_panics=cfg.min_panics,
        min_samples=cfg.min_samples,
    )
    return judge(guard, loss, limits)


def judge(guard: Guard, loss: Tensor, limits: PanicLimits) -> tuple[Guard, Tensor, Tensor]:
    """The panic rule (reference governor); the first that applies decides.

    not finite: panic at once. Collapsed: a host that had learned is back at the loss of guessing, panic at once.
    Diverged: above the absolute, the statistical and the relative threshold, panic at the `min_panics`-th in a row.
    Only an ordinary loss enters the window, and only one that was judged ends a run of divergent losses.
    """
    finite = torch.isfinite(loss)
    mean, deviation = _window_statistics(guard)
    judged = finite & (guard.count >= limits.min_samples)
    learned = mean < RECOVERED_SHARE * limits.chance_loss
    collapsed = judged & learned & ((loss - limits.chance_loss).abs() < CHANCE_BAND * limits.chance_loss)
    diverged = (
        judged
        & ~collapsed
        & (loss > limits.absolute_threshold)
        & (loss > mean + limits.sensitivity * deviation)
        & (loss > limits.multiplier * mean)
    )
    ordinary = finite & ~collapsed & ~diverged
    anomalies = torch.where(ordinary & judged, 0, guard.anomalies + diverged)
    panic = ~finite | collapsed | (diverged & (anomalies >= limits.min_panics))
    reason = torch.where(diverged, PanicReason.DIVERGED, PanicReason.NONE)
    reason = torch.where(collapsed, PanicReason.COLLAPSED_TO_CHANCE, reason)
    reason = torch.where(finite, reason, PanicReason.NOT_FINITE)
    pushed = torch.cat((guard.losses[:, 1:], loss.unsqueeze(-1)), -1)
    guard = guard.replace(
        losses=torch.where(ordinary.unsqueeze(-1), pushed, guard.losses),
        count=(guard.count + ordinary).clamp(max=guard.losses.shape[-1]),
        anomalies=anomalies,
    )
    return guard, panic, reason


def _window_statistics(guard: Guard) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation [N] of the losses in the window; 0 where there is none."""
    size = guard.losses.shape[-1]
    valid = torch.arange(size, device=guard.losses.device) >= size - guard.count.unsqueeze(-1)
    number = guard.count.clamp(min=1)
    mean = torch.where(valid, guard.losses, 0.0).sum(-1) / number
    spread = torch.where(valid, guard.losses - mean.unsqueeze(-1), 0.0)
    return mean, (spread.square().sum(-1) / number).sqrt()
