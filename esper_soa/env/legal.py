"""Legality: the heads that an op makes relevant, and the choices that the masks allow.

All policies use these functions; masks.py computes the masks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper_soa.env.masks import is_relevant
from esper_soa.state import Action, Masks, chosen, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, HEAD_NAMES, HEADS, OP_NAMES, Op


def head_masks(masks: Masks, op: Tensor) -> dict[str, Tensor]:
    """Legal choices bool [..., C] of every head, in HEADS order, once the op int64 [...] is chosen.

    A head that the op makes irrelevant keeps its placeholder alone: log-probability, entropy are 0.
    """
    slot = torch.take_along_dim(masks.slot_by_op, op[..., None, None], dim=-2).squeeze(-2)
    first = slot & (slot.cumsum(-1) == 1)
    choices = {"slot": torch.where((op == Op.WAIT)[..., None], first, slot), "op": masks.op}
    matters = {ops: stage_in(op, ops)[..., None] for ops in {head.ops for head in DETAIL_HEADS}}
    for head in DETAIL_HEADS:
        legal = masks.get(head.name)
        placeholder = torch.arange(legal.shape[-1], device=op.device) == head.placeholder
        choices[head.name] = torch.where(matters[head.ops], legal, placeholder)
    return {name: choices[name] for name in HEAD_NAMES}


def relevant_heads(op: Tensor) -> Tensor:
    """bool [..., 8], in HEADS order: the heads that matter for the op int64 [...]."""
    return torch.stack([stage_in(op, head.ops) for head in HEADS], dim=-1)


def open_heads(masks: Masks, op: Tensor) -> Tensor:
    """bool [..., 8], in HEADS order: heads with more than one legal choice for op int64 [...]."""
    return torch.stack([mask.sum(-1) > 1 for mask in head_masks(masks, op).values()], dim=-1)


def available_heads(op_mask: Tensor) -> Tensor:
    """bool [..., 8] in HEADS order: heads that a legal op of op_mask bool [..., 6] makes matter."""
    return torch.stack([is_relevant(head, op_mask) for head in HEADS], dim=-1)


def illegal_heads(action: Action, masks: Masks) -> Tensor:
    """bool [N, 8] in HEADS order: the head matters, and its choice, any number, is not offered."""
    op = action.op.clamp(0, masks.op.shape[-1] - 1)
    legal_op = _offered(masks.op, action.op)
    allowed = head_masks(masks, op)
    heads = [
        matters & legal_op & ~_offered(allowed[name], action.get(name))
        for matters, name in zip(relevant_heads(op).unbind(-1), HEAD_NAMES, strict=True)
    ]
    heads[HEAD_NAMES.index("op")] = ~legal_op
    return torch.stack(heads, dim=-1)


def _offered(mask: Tensor, choice: Tensor) -> Tensor:
    """bool [N]: choice int64 [N] is one of those that mask [N, C] offers."""
    clamped = choice.clamp(0, mask.shape[-1] - 1)
    return (clamped == choice) & chosen(mask, clamped)


def illegal_choices(
    action: Action, masks: Masks, names: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """The first illegal choice of every head that matters, in words. Reads from the device.

    names: of slots and blueprints, by number; without them their numbers stand there.
    """
    rows = illegal_heads(action, masks)
    if not bool(rows.any()):
        return []
    allowed = head_masks(masks, action.op.clamp(0, len(OP_NAMES) - 1))
    known = {head.name: head.names for head in HEADS} | dict(names or {})
    messages = []
    for place, head in enumerate(HEADS):
        for env in rows[:, place].nonzero().flatten().tolist()[:1]:
            numbers = allowed[head.name][env].nonzero().flatten().tolist()
            legal = ", ".join(_word(known[head.name], number) for number in numbers)
            subject = f"op {_word(OP_NAMES, int(action.op[env]))}"
            if head.name != "op":
                choice = int(action.get(head.name)[env])
                is_missing = head.name == "blueprint" and choice == head.placeholder
                word = f"{head.name} {_word(known[head.name], choice)}"
                subject = (
                    f"{subject} without a {head.name}" if is_missing else f"{word} for {subject}"
                )
            messages.append(f"env {env}: {subject} is not legal; legal are {legal}")
    return messages


def _word(names: Sequence[str], choice: int) -> str:
    """The name of a choice, or its number where it has none."""
    return dict(enumerate(names)).get(choice, str(choice))


def first_choice(mask: Tensor) -> Tensor:
    """Index int64 [...] of the first True of mask [..., C]; 0 where there is none."""
    return mask.to(torch.int64).argmax(-1)


def obey(action: Action, masks: Masks) -> tuple[Action, Tensor]:
    """`action` where every choice that matters is legal, else WAIT; and bool [N], where it was.

    Heads that the op makes irrelevant take their placeholders; choices may be any numbers.
    """
    legal = ~illegal_heads(action, masks).any(-1)
    op = torch.where(legal, action.op, Op.WAIT)
    allowed = head_masks(masks, op)
    heads = {
        name: torch.where(matters, action.get(name), first_choice(allowed[name]))
        for matters, name in zip(relevant_heads(op).unbind(-1), HEAD_NAMES, strict=True)
    }
    return Action.from_dict(heads | {"op": op}, batch_size=op.shape), legal
