"""Quality gates: what a seed must show before it may enter the next stage.

Given the slots, their ramps and the thresholds; every gate of every slot is judged at once,
elementwise over any batch shape. There is no G0 (a germinated seed
always has an identity) and no G4.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.config import GatesConfig
from esper_soa.state import Ramp, Slots
from esper_soa.vocabulary import AlphaMode, Stage

ALPHA_TOLERANCE = 1e-6  # alphas closer than this count as equal
FULL_SCORE_IMPROVEMENT = 5.0  # percent points in TRAINING that give G2 the score 1
FULL_SCORE_CONTRIBUTION = 10.0  # percent points that give G5 the score 1


class GateResults(NamedTuple):
    """Verdict (bool) and score (float, [0, 1]) of every gate for every slot."""

    g1: Tensor  # GERMINATED -> TRAINING
    g2: Tensor  # TRAINING -> BLENDING
    g3: Tensor  # BLENDING -> HOLDING
    g5: Tensor  # HOLDING -> FOSSILIZED
    score1: Tensor
    score2: Tensor
    score3: Tensor
    score5: Tensor


def arrived(ramp: Ramp) -> Tensor:
    """bool: the ramp is at rest at its target."""
    return (ramp.mode == AlphaMode.HOLD) & ((ramp.alpha - ramp.target).abs() <= ALPHA_TOLERANCE)


def check_gates(slots: Slots, ramp: Ramp, cfg: GatesConfig) -> GateResults:
    """Judge G1, G2, G3 and G5 as if every slot asked for each of them.

    Permissive gates ask for healthy gradients (G2) and any measured contribution, even a negative
    one (G5); strict gates ask for improvement and gradient share (G2), time in BLENDING (G3) and a
    positive contribution (G5).
    """
    old_enough = slots.stage_age >= cfg.min_blending_steps
    g1 = slots.stage == Stage.GERMINATED
    g3 = (ramp.target >= 1 - ALPHA_TOLERANCE) & arrived(ramp)
    g5 = slots.contribution_known
    if cfg.permissive:
        healthy = (slots.gradient_health >= cfg.min_gradient_health) & ~slots.gradient_exploding
        g2 = old_enough & slots.gradient_measured & healthy
    else:
        learning = slots.gradient_ratio_known & (slots.gradient_ratio >= cfg.min_gradient_ratio)
        g2 = old_enough & learning & (slots.improvement >= cfg.min_training_improvement)
        g3 = g3 & old_enough
        g5 = g5 & (slots.contribution >= cfg.min_fossilize_contribution)
    contribution = torch.where(slots.contribution_known, slots.contribution, 0.0)
    return GateResults(
        g1=g1,
        g2=g2,
        g3=g3,
        g5=g5,
        score1=g1.to(ramp.alpha.dtype),
        score2=(slots.improvement / FULL_SCORE_IMPROVEMENT).clamp(0.0, 1.0),
        score3=ramp.alpha,
        score5=(contribution / FULL_SCORE_CONTRIBUTION).clamp(0.0, 1.0),
    )
