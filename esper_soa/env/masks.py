"""Which choices of every action head are legal, from the ledger alone.

Given slots, ramps and the lifecycle settings; called once per env-step before the decision. An op that is legal here
is applicable in `lifecycle.apply`; whether its quality gate passes is only known when it is executed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.config import LifecycleConfig
from esper_soa.state import Masks, Ramp, Slots, stage_in
from esper_soa.vocabulary import LIVE_STAGES, PLACEHOLDERS, AlphaMode, Blueprint, Stage, head_sizes

UNSETTLED_STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
ADVANCEABLE_STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING)
PRUNABLE_STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
RETARGETABLE_STAGES = (Stage.BLENDING, Stage.HOLDING)


class SlotFacts(NamedTuple):
    """What the masks read of every slot, [N, S]."""

    stage: Tensor  # int64, Stage
    seed_age: Tensor  # int64, env-steps
    mode: Tensor  # int64, AlphaMode
    enabled: Tensor  # bool, the slot may be acted upon


class MaskRules(NamedTuple):
    """What the masks read of an env; numbers or tensors that broadcast over [N, 1]."""

    num_seeds: Tensor  # int64, live seeds including fossils
    max_seeds: Tensor | int  # 0 = unlimited
    min_prune_age: Tensor | int  # env-steps
    advance_disabled: Tensor  # bool, every gate forwards by itself
    moving_prunable: Tensor  # bool, PRUNE is legal while the alpha ramp moves
    blueprints: Tensor  # bool [N, 13] or [1, 13], blueprints that exist for the host


def action_masks(
    slots: Slots, ramp: Ramp, blueprints_allowed: Tensor, max_seeds: int, lifecycle: LifecycleConfig
) -> Masks:
    """Legal choices of N envs.

    blueprints_allowed: bool [13], what can be germinated in this task's host (NOOP is never legal).
    max_seeds: live seeds, fossils included, from which on GERMINATE is masked; 0 = unlimited.
    """
    no = torch.zeros_like(slots.stage[:, :1], dtype=torch.bool)
    facts = SlotFacts(slots.stage, slots.seed_age, ramp.mode, torch.ones_like(slots.stage, dtype=torch.bool))
    rules = MaskRules(
        num_seeds=stage_in(slots.stage, LIVE_STAGES).sum(-1, keepdim=True),
        max_seeds=max_seeds,
        min_prune_age=lifecycle.min_prune_age,
        advance_disabled=~no if lifecycle.advance_disabled else no,
        moving_prunable=no,
        blueprints=blueprints_allowed.unsqueeze(0),
    )
    return legal_choices(facts, rules)


def legal_choices(facts: SlotFacts, rules: MaskRules) -> Masks:
    """Legal choices from the bare facts (reference action masks).

    A seed that is not yet blending, or a slot that cools down, blocks germination in every slot of its env.
    """
    by_op = _legal_slots(facts, rules)
    op = by_op.any(-1)
    op = torch.cat((torch.ones_like(op[:, :1]), op[:, 1:]), -1)
    shaped = op[:, 1:2] | op[:, 2:3]  # GERMINATE or SET_ALPHA_TARGET
    sizes = head_sizes(facts.stage.shape[-1])
    choices = torch.arange(max(sizes), device=op.device)
    free = torch.ones_like(op[:, :1])
    blueprints = rules.blueprints & (choices[: sizes[1]] != Blueprint.NOOP)
    return Masks(
        slot=facts.enabled,
        blueprint=blueprints.expand(op.shape[0], -1),
        style=shaped | (choices[: sizes[2]] == PLACEHOLDERS["style"]),
        tempo=free.expand(-1, sizes[3]),
        alpha_target=shaped | (choices[: sizes[4]] == PLACEHOLDERS["alpha_target"]),
        alpha_speed=free.expand(-1, sizes[5]),
        alpha_curve=free.expand(-1, sizes[6]),
        op=op,
        slot_by_op=by_op,
        batch_size=op.shape[:1],
    )


def _legal_slots(facts: SlotFacts, rules: MaskRules) -> Tensor:
    """bool [N, 6, S]: slots on which each op is applicable; all enabled slots for WAIT."""
    stage, enabled = facts.stage, facts.enabled
    empty = enabled & (stage == Stage.EMPTY)
    unsettled = (enabled & stage_in(stage, UNSETTLED_STAGES)).any(-1, keepdim=True)
    full = (rules.num_seeds >= rules.max_seeds) & (rules.max_seeds > 0)
    resting = facts.mode == AlphaMode.HOLD
    old = facts.seed_age >= rules.min_prune_age
    return torch.stack(
        (
            enabled,
            empty & ~full & ~unsettled,
            enabled & stage_in(stage, RETARGETABLE_STAGES) & resting,
            enabled & stage_in(stage, PRUNABLE_STAGES) & old & (resting | rules.moving_prunable),
            enabled & (stage == Stage.HOLDING),
            enabled & stage_in(stage, ADVANCEABLE_STAGES) & ~rules.advance_disabled,
        ),
        dim=-2,
    )
