"""Masked categorical distributions of the action heads, in float32, shared by rollout and update.

Given logits, a mask of legal choices and a probability floor, they give log-probabilities,
entropies and choices. Also which heads an op makes relevant, and which choices of an action its
masks do not offer: the one rule of what is legal for any agent.
"""

import torch
from torch import Tensor

from esper_soa.env.masks import matters_for_some
from esper_soa.state import Action, Masks, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, HEAD_NAMES, HEADS, OP_NAMES, Op

MASKED_LOGIT = -1e4  # finite, and its exponential is exactly 0 in float32
MAX_FLOOR_MASS = 0.99  # all floors of a head together take at most this much probability


def masked_log_probs(logits: Tensor, mask: Tensor, floor: float) -> Tensor:
    """Log-probabilities float32 [..., C] of the mixture q = (1 - n f) p + f over n legal choices.

    p is the softmax of the legal logits and f = min(floor, 0.99 / n), so that every legal choice
    keeps at least f and every logit its gradient. Illegal choices get MASKED_LOGIT: probability 0.
    """
    log_probs = torch.log_softmax(torch.where(mask, logits.float(), MASKED_LOGIT), dim=-1)
    if floor > 0:
        num_legal = mask.sum(-1, keepdim=True).clamp(min=1)
        share = (MAX_FLOOR_MASS / num_legal).clamp(max=floor)
        mixed = (1 - num_legal * share) * log_probs.exp() + share
        log_probs = torch.where(num_legal == 1, log_probs, mixed.log())
    return torch.where(mask, log_probs, MASKED_LOGIT)


def entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy [...] over the legal choices of log_probs [..., C], over the uniform's; 0 for one."""
    num_legal = mask.sum(-1)
    raw = -torch.where(mask, log_probs.exp() * log_probs, 0.0).sum(-1)
    return torch.where(num_legal > 1, raw / num_legal.clamp(min=2).float().log(), 0.0)


def choose(log_probs: Tensor, noise: Tensor) -> Tensor:
    """Sample int64 [...] from log_probs [..., C] by inverting the cumulative distribution at
    `noise` in [0, 1).

    A choice of probability 0 is never taken, however the cumulative sums are rounded.
    """
    probs = log_probs.exp()
    cumulative = probs.cumsum(-1)
    index = torch.arange(probs.shape[-1], device=probs.device)
    possible = probs > 0
    last = torch.where(possible, index, 0).amax(-1, keepdim=True)
    reached = possible & (cumulative > noise.unsqueeze(-1) * cumulative[..., -1:])
    return torch.where(reached | (index == last), index, probs.shape[-1] - 1).amin(-1)


def log_prob_of(log_probs: Tensor, choice: Tensor) -> Tensor:
    """Log-probability [...] of the choice int64 [...] under log_probs [..., C]."""
    return log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def head_masks(masks: Masks, op: Tensor) -> dict[str, Tensor]:
    """Legal choices bool [..., C] of every head, in HEADS order, once the op int64 [...] is chosen.

    A head that the op makes irrelevant keeps exactly one choice, its placeholder: log-probability
    and entropy are 0.
    """
    row = op[..., None, None].expand(*op.shape, 1, masks.slot_by_op.shape[-1])
    slot = masks.slot_by_op.gather(-2, row).squeeze(-2)
    first = slot & (slot.cumsum(-1) == 1)
    chosen = {"slot": torch.where((op == Op.WAIT)[..., None], first, slot)}
    for head in DETAIL_HEADS:
        legal = masks.get(head.name)
        placeholder = torch.arange(legal.shape[-1], device=op.device) == head.placeholder
        chosen[head.name] = torch.where(stage_in(op, head.ops)[..., None], legal, placeholder)
    chosen["op"] = masks.op
    return chosen


def relevant_heads(op: Tensor) -> Tensor:
    """bool [..., 8], in HEADS order: the heads that matter for the op int64 [...]."""
    return torch.stack([stage_in(op, head.ops) for head in HEADS], dim=-1)


def open_heads(masks: Masks, op: Tensor) -> Tensor:
    """bool [..., 8], in HEADS order: heads with more than one legal choice for op int64 [...]."""
    return torch.stack([mask.sum(-1) > 1 for mask in head_masks(masks, op).values()], dim=-1)


def available_heads(op_mask: Tensor) -> Tensor:
    """bool [..., 8] in HEADS order: heads that a legal op of op_mask bool [..., 6] makes matter."""
    return torch.stack([matters_for_some(head, op_mask) for head in HEADS], dim=-1)


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
