"""Quality gates: what a seed must show before it may enter the next stage.

Given the slots, their ramps and the thresholds; every gate of every slot is judged at once,
elementwise over any batch shape. There is no G0 (a germinated seed always has an identity), no G4.
"""

from typing import NamedTuple

from torch import Tensor

from esper_soa.env.config import GatesConfig
from esper_soa.state import Ramp, Slots
from esper_soa.vocabulary import AlphaMode, Stage

ALPHA_TOLERANCE = 1e-6  # alphas closer than this count as equal


class GateResults(NamedTuple):
    """Verdict (bool) of every gate for every slot."""

    g1: Tensor  # GERMINATED -> TRAINING
    g2: Tensor  # TRAINING -> BLENDING
    g3: Tensor  # BLENDING -> HOLDING
    g5: Tensor  # HOLDING -> FOSSILIZED


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
    return GateResults(slots.stage == Stage.GERMINATED, g2, g3, g5)
