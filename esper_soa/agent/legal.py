"""Which choices of an action its masks do not offer, told head by head: the one rule of what is
legal for an agent.

Given actions by scripted policies, by agents of users' own and by callers of the simulator.
"""

import torch
from torch import Tensor

from esper_soa.agent.distribution import head_masks, relevant_heads
from esper_soa.state import Action, Masks
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES


def illegal_heads(action: Action, masks: Masks) -> Tensor:
    """bool [N, 8] in HEADS order: the head matters, its choice is not offered; or an illegal op.

    Choices may be any numbers.
    """
    op = action.op.clamp(0, masks.op.shape[-1] - 1)
    legal_op = _offered(masks.op, action.op)
    offered = head_masks(masks, op)
    relevant = relevant_heads(op).unbind(-1)
    heads = [
        matters & legal_op & ~_offered(offered[name], action.get(name))
        for matters, name in zip(relevant, HEAD_NAMES, strict=True)
    ]
    heads[HEAD_NAMES.index("op")] = ~legal_op
    return torch.stack(heads, dim=-1)


def _offered(mask: Tensor, choice: Tensor) -> Tensor:
    """bool [N]: choice int64 [N] is one of those that mask [N, C] offers."""
    inside = choice.clamp(0, mask.shape[-1] - 1)
    return (inside == choice) & mask.gather(-1, inside.unsqueeze(-1)).squeeze(-1)


def illegal_choices(action: Action, masks: Masks) -> list[str]:
    """The first choice of every head that is not legal, in words; heads that the op makes
    irrelevant may say anything.

    Read by the host.
    """
    rows = illegal_heads(action, masks)
    if not bool(rows.any()):
        return []
    offered = head_masks(masks, action.op.clamp(0, len(OP_NAMES) - 1))
    found = []
    for head, name in enumerate(HEAD_NAMES):
        envs = rows[:, head].nonzero().flatten().tolist()
        if envs:
            choice = int(action.get(name)[envs[0]])
            op = int(action.op[envs[0]])
            numbers = offered[name][envs[0]].nonzero().flatten().tolist()
            legal = [_word(name, one) for one in numbers]
            what = f"op {_word('op', op)}"
            if name != "op":
                what = f"{name} {choice} for {what}"
            found.append(f"env {envs[0]}: {what} is not legal; legal are {', '.join(legal)}")
    return found


def _word(head: str, choice: int) -> str:
    """A choice as people call it: an op by its name, where it has one."""
    return OP_NAMES[choice] if head == "op" and 0 <= choice < len(OP_NAMES) else str(choice)
