"""Which ops a slot allows: by its stage, its ramp and the age of its seed, each told here alone.

masks.py offers what slots and their env allow; lifecycle.py takes an action that its slot does not
allow for WAIT, and carries out what the stage allows. Whether a quality gate lets a seed pass is
asked only when an op is carried out.
"""

import torch
from torch import Tensor

from esper_soa.state import stage_in
from esper_soa.vocabulary import OP_NAMES, AlphaMode, Op, Stage

# Where ADVANCE leads, one gate after the other, as does a gate that forwards by itself: (from, to),
# in order of life.
ADVANCES = (
    (Stage.GERMINATED, Stage.TRAINING),
    (Stage.TRAINING, Stage.BLENDING),
    (Stage.BLENDING, Stage.HOLDING),
)
# The table [op, stage], as the stages in which an op means something; WAIT does in all.
LEGAL_STAGES = {
    Op.GERMINATE: (Stage.EMPTY,),
    Op.SET_ALPHA_TARGET: (Stage.BLENDING, Stage.HOLDING),
    Op.PRUNE: (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.ADVANCE: tuple(before for before, _ in ADVANCES),
}


def stage_allows(op: int, stage: Tensor) -> Tensor:
    """bool, in the shape of `stage` (int64): `op`, one of LEGAL_STAGES, means something there."""
    return stage_in(stage, LEGAL_STAGES[op])


def at_rest(mode: Tensor) -> Tensor:
    """bool, shaped as `mode` (AlphaMode): alpha does not move, so it may be sent elsewhere."""
    return mode == AlphaMode.HOLD


def slot_allows(stage: Tensor, seed_age: Tensor, mode: Tensor, min_prune_age: int) -> Tensor:
    """bool [N, 6, S]: the slots on which each op is applicable, as far as the slot itself decides.

    stage, seed_age (env-steps) and mode (AlphaMode): int64 [N, S]. Below min_prune_age a seed is
    not pruned, nor one whose alpha moves.
    """
    resting = at_rest(mode)
    beside = {Op.SET_ALPHA_TARGET: resting, Op.PRUNE: (seed_age >= min_prune_age) & resting}
    everywhere = torch.ones_like(resting)
    allowed = [everywhere]  # WAIT
    for op in range(1, len(OP_NAMES)):
        allowed.append(stage_allows(op, stage) & beside.get(op, everywhere))
    return torch.stack(allowed, dim=-2)
