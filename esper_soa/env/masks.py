"""Which ops a slot allows, by stage, ramp and age, and which choices of action heads that leaves.

lifecycle.py takes an action that its slot does not allow for WAIT; gates are asked only there.
"""

import torch
from torch import Tensor

from esper_soa.config.env import LifecycleConfig
from esper_soa.config.ranges import EnvNumber
from esper_soa.env.env_settings import steps_by_slot
from esper_soa.state import Masks, Ramp, Slots, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, OP_NAMES, AlphaMode, Blueprint, Head, Op, Stage

# A seed in one of them, not yet blending or on its way out, blocks germination in all its env.
COOLING_STAGES = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
UNSETTLED_STAGES = (Stage.GERMINATED, Stage.TRAINING, *COOLING_STAGES)
# Where ADVANCE leads, or a gate that forwards by itself: (from, to), in order of life.
ADVANCES = (
    (Stage.GERMINATED, Stage.TRAINING),
    (Stage.TRAINING, Stage.BLENDING),
    (Stage.BLENDING, Stage.HOLDING),
)
LEGAL_STAGES = {  # the stages in which an op means something; WAIT does in all
    Op.GERMINATE: (Stage.EMPTY,),
    Op.SET_ALPHA_TARGET: (Stage.BLENDING, Stage.HOLDING),
    Op.PRUNE: (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.ADVANCE: tuple(before for before, _ in ADVANCES),
}


def stage_allows(op: int, stage: Tensor) -> Tensor:
    """bool, in the shape of `stage` (int64): `op`, one of LEGAL_STAGES, means something there."""
    return stage_in(stage, LEGAL_STAGES[op])


def slot_allows(
    stage: Tensor, seed_age: Tensor, mode: Tensor, min_prune_age: EnvNumber | Tensor
) -> Tensor:
    """bool [N, 6, S]: the slots on which each op is applicable, as far as the slot itself decides.

    stage, seed_age (env-steps), mode (AlphaMode): int64 [N, S]. Seeds below min_prune_age are not
    pruned, nor those whose alpha moves; nor may a moving one be given a new target.
    """
    resting = mode == AlphaMode.HOLD
    old_enough = seed_age >= steps_by_slot(min_prune_age)
    extra = {Op.SET_ALPHA_TARGET: resting, Op.PRUNE: old_enough & resting}
    everywhere = torch.ones_like(resting)
    ops = range(Op.WAIT + 1, len(OP_NAMES))
    allowed = [stage_allows(op, stage) & extra.get(op, everywhere) for op in ops]
    return torch.stack([everywhere, *allowed], dim=-2)


def action_masks(
    slots: Slots,
    ramp: Ramp,
    blueprints_allowed: Tensor,
    max_seeds: int | Tensor,
    lifecycle: LifecycleConfig,
) -> Masks:
    """Legal choices of N envs (reference action masks).

    blueprints_allowed: bool [P], what can be germinated in this task's host (NOOP is never legal).
    max_seeds: live seeds, fossils included, from which on GERMINATE is masked; 0 = unlimited.
    """
    stage = slots.stage
    num_seeds = slots.live.sum(-1, keepdim=True)
    has_unsettled = stage_in(stage, UNSETTLED_STAGES).any(-1, keepdim=True)
    by_env = [torch.ones_like(has_unsettled)] * len(OP_NAMES)
    by_env[Op.GERMINATE] = ~has_unsettled & ((num_seeds < max_seeds) | (max_seeds == 0))
    by_env[Op.ADVANCE] = torch.full_like(has_unsettled, not lifecycle.advance_disabled)
    by_slot = slot_allows(stage, slots.seed_age, ramp.mode, min_prune_age=lifecycle.min_prune_age)
    by_op = by_slot & torch.stack(by_env, dim=-2)
    op = by_op.any(-1)
    codes = torch.arange(blueprints_allowed.shape[-1], device=op.device)
    can_germinate = (blueprints_allowed & (codes != Blueprint.NOOP)).expand(op.shape[0], -1)
    every_slot = torch.ones_like(stage, dtype=torch.bool)
    masks = {head.name: allowed_choices(head, op) for head in DETAIL_HEADS}
    masks |= {"slot": every_slot, "blueprint": can_germinate, "op": op, "slot_by_op": by_op}
    return Masks.from_dict(masks, batch_size=op.shape[:1])


def allowed_choices(head: Head, op: Tensor) -> Tensor:
    """bool [N, C]: what the legal ops [N, 6] leave of the choices of a head.

    All, but that a head which is `fixed` keeps its placeholder alone where no op that it matters
    for is legal. The blueprint head is not restricted here.
    """
    if not head.fixed:
        return torch.ones_like(op[:, :1]).expand(-1, len(head.names))
    placeholder = torch.arange(len(head.names), device=op.device) == head.placeholder
    return is_relevant(head, op).unsqueeze(-1) | placeholder


def is_relevant(head: Head, op: Tensor) -> Tensor:
    """bool [...]: some legal op of op [..., 6] makes the head matter."""
    legal = op.unbind(-1)
    return torch.stack([legal[code] for code in head.ops]).any(0)
