"""Which seed stands in every slot and how it takes part in a pass: one number per network and slot, on the device.

Made without a read by the host from the env state, or from the arrays of a pass; the kernels branch on it. Imports no
Triton.
"""

import numpy as np
import torch
from torch import Tensor

from esper_soa.nets.pools import upload
from esper_soa.nets.seed_plan import THROUGH as STRAIGHT_THROUGH
from esper_soa.nets.seed_plan import SeedPlan
from esper_soa.state import Ramp, Slots, stage_in
from esper_soa.vocabulary import AlphaMode, Blend, Stage

RUNNING, THROUGH, MULTIPLIED, GATED, DETACHED, FROZEN, MEASURED, ABLATED, FOSSIL = (1 << bit for bit in range(9))
CODE_SHIFT = 9  # the blueprint's code stands above the flags


def planned(plan: SeedPlan, device: torch.device, ablated: np.ndarray | None = None) -> Tensor:
    """int32 [N, S] of a pass whose plan the host holds; nobody waits for the upload.

    ablated: bool [N, S], seeds that subset rows of a validation pass leave out.
    """
    flags = plan.running * RUNNING | (plan.blend == STRAIGHT_THROUGH) * THROUGH
    flags |= (plan.blend == Blend.MULTIPLY) * MULTIPLIED | (plan.blend == Blend.GATE) * GATED
    flags |= plan.detached * DETACHED | plan.frozen * FROZEN | plan.measured * MEASURED
    flags |= 0 if ablated is None else ablated * ABLATED
    words = np.where(plan.running, flags | plan.blueprint << CODE_SHIFT, 0)
    return upload(words.astype(np.int32), device)


def training_roster(slots: Slots, ramp: Ramp, detached_stages: tuple[int, ...]) -> Tensor:
    """int32 [N, S] of a training pass, from the env state where it lies; the same as of `training_plan`."""
    through, frozen = slots.stage == Stage.TRAINING, ramp.mode == AlphaMode.DOWN
    measured = (through | (slots.stage == Stage.BLENDING)) & ~frozen
    return _words(slots, slots.running, detached_stages, [(through, THROUGH), (frozen, FROZEN), (measured, MEASURED)])


def validation_roster(slots: Slots, ramp: Ramp, detached_stages: tuple[int, ...], ablate_fossils: bool) -> Tensor:
    """int32 [N, S] of a validation pass: seeds with an alpha above 0; those that subset rows leave out are ABLATED."""
    visible, fossil = slots.running & (slots.alpha > 0), slots.stage == Stage.FOSSILIZED
    ablated = visible if ablate_fossils else visible & ~fossil
    through = slots.stage == Stage.TRAINING
    return _words(slots, visible, detached_stages, [(through, THROUGH), (ablated, ABLATED), (fossil, FOSSIL)])


def _words(slots: Slots, running: Tensor, detached_stages: tuple[int, ...], marks: list[tuple[Tensor, int]]) -> Tensor:
    detached = stage_in(slots.stage, detached_stages) if detached_stages else torch.zeros_like(running)
    through = slots.stage == Stage.TRAINING
    blends = [((slots.blend == Blend.MULTIPLY) & ~through, MULTIPLIED), ((slots.blend == Blend.GATE) & ~through, GATED)]
    words = slots.blueprint << CODE_SHIFT
    for where, flag in [(running, RUNNING), (detached, DETACHED), *blends, *marks]:
        words = words | where.long() * flag
    return torch.where(running, words, 0).int()
