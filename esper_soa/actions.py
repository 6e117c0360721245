"""Actions as a caller gives them, as a record, heads by name, rows of heads or numbers of joint actions; legality.

Used by the simulator, which lets nothing illegal reach an env.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.agent.distribution import head_masks, relevant_heads
from esper_soa.agent.scripted import obey
from esper_soa.env.joint import JointActions
from esper_soa.state import Action, Masks
from esper_soa.vocabulary import HEAD_NAMES, HEADS, OP_NAMES, Op

Given = Action | Mapping[str, object] | Tensor | np.ndarray


class Checked(NamedTuple):
    """What is carried out, and for which envs it is not what was asked for."""

    action: Action
    illegal: Tensor  # bool [N]; these wait


def read_action(given: Given, num_envs: int, joint: JointActions) -> Action:
    """The Action [N] that `given` stands for.

    given: an Action; choices by head name, numbers or int [N], where heads that are left out keep their placeholders;
    int [N, 8] in HEADS order; or int [N] of joint actions. Raises ValueError for other shapes, types and names.
    """
    if isinstance(given, Action):
        heads: dict[str, object] = {name: given.get(name) for name in HEAD_NAMES}
    elif isinstance(given, Mapping):
        unknown = set(given) - set(HEAD_NAMES)
        if unknown:
            raise ValueError(f"action heads are {', '.join(HEAD_NAMES)}, not {', '.join(sorted(map(str, unknown)))}")
        heads = {head.name: given.get(head.name, head.placeholder) for head in HEADS}
    else:
        rows = _integers("actions", given, joint.rows.device)
        if rows.shape == (num_envs,):
            return joint.action(rows)
        if rows.shape != (num_envs, len(HEADS)):
            raise ValueError(
                f"actions are numbers [{num_envs}] of joint actions or choices [{num_envs}, {len(HEADS)}], "
                f"not {list(rows.shape)}"
            )
        heads = dict(zip(HEAD_NAMES, rows.unbind(1), strict=True))
    choices = {name: _integers(name, value, joint.rows.device) for name, value in heads.items()}
    for name, choice in choices.items():
        if choice.ndim > 1 or choice.numel() not in (1, num_envs):
            raise ValueError(f"the {name} head takes a number or one for each of {num_envs} envs, not {choice.shape}")
    return Action.from_dict(
        {name: choice.reshape(-1).expand(num_envs) for name, choice in choices.items()}, batch_size=[num_envs]
    )


def _integers(name: str, value: object, device: torch.device) -> Tensor:
    """`value` as int64 on the device."""
    found = torch.as_tensor(value, device=device)  # type: ignore[arg-type]
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, not {found.dtype}")
    return found.to(torch.int64)


def check_action(action: Action, masks: Masks, raising: bool) -> Checked:
    """`action` with WAIT in the envs where it is not legal; ValueError that names the first of them where `raising`."""
    sizes = {name: mask.shape[-1] for name, mask in head_masks(masks, torch.zeros_like(action.op)).items()}
    exists = torch.ones_like(action.op, dtype=torch.bool)
    heads: dict[str, Tensor] = {}
    for (name, size), matters in zip(sizes.items(), _read_heads(action.op), strict=True):
        choice = action.get(name)
        inside = (choice >= 0) & (choice < size)
        exists = exists & (inside | ~matters)
        heads[name] = torch.where(inside, choice, 0)
    heads["op"] = torch.where(exists, heads["op"], Op.WAIT)
    obeyed, legal = obey(Action.from_dict(heads, batch_size=action.op.shape), masks)
    illegal = ~(legal & exists)
    if raising and bool(illegal.any()):
        env = int(illegal.nonzero()[0, 0])
        raise ValueError(f"env {env}: {_fault(action[env], masks[env])}")
    return Checked(obeyed, illegal)


def _read_heads(op: Tensor) -> tuple[Tensor, ...]:
    """bool [N] per head in HEADS order: the op reads it; the op itself always counts."""
    return relevant_heads(op.clamp(0, len(OP_NAMES) - 1)).unbind(-1)


def _fault(action: Action, masks: Masks) -> str:
    """What is wrong with the action [] of an env, in words."""
    op = int(action.op)
    ops = [name for name, legal in zip(OP_NAMES, masks.op.tolist(), strict=True) if legal]
    if not 0 <= op < len(OP_NAMES) or not bool(masks.op[op]):
        called = OP_NAMES[op] if 0 <= op < len(OP_NAMES) else str(op)
        return f"the op {called} is not legal now; legal are {', '.join(ops)}"
    offered = head_masks(masks, action.op)
    for head in HEADS[:-1]:
        legal = offered[head.name].nonzero().flatten().tolist()
        if op in head.ops and int(action.get(head.name)) not in legal:
            wrong = int(action.get(head.name))
            return f"{OP_NAMES[op]} with {head.name} {wrong} is not legal now; legal are {', '.join(map(str, legal))}"
    raise AssertionError("a legal action has no fault")
