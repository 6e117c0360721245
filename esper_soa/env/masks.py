"""Which choices of every action head are legal, from the state kernels alone.

Given slots, ramps and the lifecycle settings; called once per env-step before the decision. What a
slot allows is legality.py's business, what its env allows is told here. An op that is legal here is
applicable in `lifecycle.apply`; whether its quality gate passes is only known when it is executed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.config import LifecycleConfig
from esper_soa.env.legality import slot_allows
from esper_soa.state import Masks, Ramp, Slots, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, LIVE_STAGES, OP_NAMES, Blueprint, Head, Op, Stage

# A seed in one of them, not yet blending or on its way out, blocks germination in every slot of its
# env.
UNSETTLED_STAGES = (
    Stage.GERMINATED,
    Stage.TRAINING,
    Stage.PRUNED,
    Stage.EMBARGOED,
    Stage.RESETTING,
)


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
    blueprints: Tensor  # bool [N, P] or [1, P], blueprints that exist for the host


def action_masks(
    slots: Slots, ramp: Ramp, blueprints_allowed: Tensor, max_seeds: int, lifecycle: LifecycleConfig
) -> Masks:
    """Legal choices of N envs.

    blueprints_allowed: bool [P], what can be germinated in this task's host (NOOP is never legal).
    max_seeds: live seeds, fossils included, from which on GERMINATE is masked; 0 = unlimited.
    """
    no = torch.zeros_like(slots.stage[:, :1], dtype=torch.bool)
    facts = SlotFacts(
        slots.stage, slots.seed_age, ramp.mode, torch.ones_like(slots.stage, dtype=torch.bool)
    )
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
    """Legal choices from the bare facts (reference action masks)."""
    by_op = _legal_slots(facts, rules)
    op = by_op.any(-1)
    op = torch.cat((torch.ones_like(op[:, :1]), op[:, 1:]), -1)
    codes = torch.arange(rules.blueprints.shape[-1], device=op.device)
    germinable = (rules.blueprints & (codes != Blueprint.NOOP)).expand(op.shape[0], -1).clone()
    offered = {head.name: choices_left(head, op) for head in DETAIL_HEADS} | {
        "blueprint": germinable
    }
    masks = {"slot": facts.enabled, **offered, "op": op, "slot_by_op": by_op}
    return Masks.from_dict(masks, batch_size=op.shape[:1])


def choices_left(head: Head, op: Tensor) -> Tensor:
    """bool [N, C]: what the legal ops [N, 6] leave of the choices of a head.

    All, but that a head which is `fixed` keeps its placeholder alone where no op that it matters
    for is legal. Which blueprints there are is for the rules to say.
    """
    if not head.fixed:
        return torch.ones_like(op[:, :1]).expand(-1, head.choices)
    placeholder = torch.arange(head.choices, device=op.device) == head.placeholder
    return matters_for_some(head, op).unsqueeze(-1) | placeholder


def matters_for_some(head: Head, op: Tensor) -> Tensor:
    """bool [...]: some legal op of op [..., 6] makes the head matter."""
    legal = op.unbind(-1)
    return torch.stack([legal[code] for code in head.ops]).any(0)


def _legal_slots(facts: SlotFacts, rules: MaskRules) -> Tensor:
    """bool [N, 6, S]: slots on which each op is applicable; all enabled slots for WAIT."""
    by_slot = slot_allows(
        facts.stage, facts.seed_age, facts.mode, rules.min_prune_age, rules.moving_prunable
    )
    unsettled = (facts.enabled & stage_in(facts.stage, UNSETTLED_STAGES)).any(-1, keepdim=True)
    full = (rules.num_seeds >= rules.max_seeds) & (rules.max_seeds > 0)
    by_env = [torch.ones_like(unsettled)] * len(OP_NAMES)
    by_env[Op.GERMINATE] = ~full & ~unsettled
    by_env[Op.ADVANCE] = ~rules.advance_disabled
    return by_slot & facts.enabled.unsqueeze(-2) & torch.stack(by_env, dim=-2)
