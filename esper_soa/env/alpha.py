"""Alpha ramps: how a seed's weight in its host's activations changes per tick, elementwise."""

import math

import torch
from torch import Tensor

from esper_soa.state import Ramp, set_where
from esper_soa.vocabulary import AlphaMode, Curve

MIN_STEEPNESS = 0.1  # flattest sigmoid that a ramp stores


def _logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) by two branches: never overflows, keeps its digits on both sides of 0."""
    shrunk = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + shrunk), shrunk / (1 + shrunk))


def curve_progress(t: Tensor, curve: Tensor, steepness: Tensor) -> Tensor:
    """Part of the way covered, [0, 1], after part `t` of the time (clamped to [0, 1]).

    LINEAR: t. COSINE: (1 - cos(pi t)) / 2. SIGMOID: the logistic function of slope `steepness`
    around t = 1/2, stretched to start at 0 and end at 1; t where it is too flat for that.
    """
    t = t.clamp(0.0, 1.0)
    low = _logistic(-0.5 * steepness)
    high = _logistic(0.5 * steepness)
    flat = high == low
    span = torch.where(flat, 1.0, high - low)
    sigmoid = torch.where(flat, t, (_logistic(steepness * (t - 0.5)) - low) / span)
    curved = torch.where(curve == Curve.SIGMOID, sigmoid, t)
    return torch.where(curve == Curve.COSINE, 0.5 * (1 - torch.cos(math.pi * t)), curved)


def retarget(
    ramp: Ramp, where: Tensor, target: Tensor, length: Tensor, curve: Tensor, steepness: Tensor
) -> Ramp:
    """Start a new ramp on `where` from the present alpha to `target`, over `length` ticks; 0 ticks
    jump at once. Both are clamped: to [0, 1], to at least 0.

    Only ramps in mode HOLD may be given a new target: the caller ensures this. A ramp to where
    alpha already is stays in HOLD with its length stored.
    """
    target = target.clamp(0.0, 1.0)
    length = length.clamp(min=0)
    instant = length == 0
    rising = torch.where(target > ramp.alpha, AlphaMode.UP, AlphaMode.HOLD)
    mode = torch.where(target < ramp.alpha, AlphaMode.DOWN, rising)
    path: dict[str, Tensor | float] = {"start": ramp.alpha, "target": target, "done": 0}
    path |= {"length": length, "curve": curve, "steepness": steepness.clamp(min=MIN_STEEPNESS)}
    path |= {"alpha": torch.where(instant, target, ramp.alpha)}
    return set_where(ramp, where, path | {"mode": torch.where(instant, AlphaMode.HOLD, mode)})


def advance_ramp(ramp: Ramp, running: Tensor) -> tuple[Ramp, Tensor]:
    """Move the ramps of `running` (bool) on by one tick; also bool, where a ramp just arrived.

    After tick k of n alpha is start + (target - start) progress(k / n), so no tick leaves alpha at
    its start, and the last one sets the target exactly. Ramps in HOLD do not move.
    """
    moving = running & (ramp.mode != AlphaMode.HOLD)
    done = torch.where(moving, torch.minimum(ramp.done + 1, ramp.length), ramp.done)
    complete = moving & (done >= ramp.length)
    time = done.to(ramp.alpha.dtype) / ramp.length.clamp(min=1)
    progress = curve_progress(time, ramp.curve, ramp.steepness)
    low = torch.minimum(ramp.start, ramp.target)
    high = torch.maximum(ramp.start, ramp.target)
    path = (ramp.start + (ramp.target - ramp.start) * progress).clamp(low, high)
    alpha = torch.where(complete, ramp.target, torch.where(moving, path, ramp.alpha))
    mode = torch.where(complete, AlphaMode.HOLD, ramp.mode)
    return ramp.replace(alpha=alpha, done=done, mode=mode), complete
