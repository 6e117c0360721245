"""Actions as a caller gives them, as a record, heads by name, rows of heads or numbers of joint
actions; legality: nothing illegal reaches an env.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from esper_soa.env.joint import JointActions
from esper_soa.env.legal import illegal_choices, obey
from esper_soa.state import Action, Masks
from esper_soa.vocabulary import HEAD_NAMES, HEADS

Given = Action | Mapping[str, object] | Tensor | np.ndarray


def read_action(given: Given, num_envs: int, joint: JointActions) -> Action:
    """The Action [N] that `given` stands for.

    given: an Action; choices by head name, numbers or int [N], where heads that are left out keep
    their placeholders; int [N, 8] in HEADS order; or int [N] of joint actions. Raises ValueError
    for other shapes, types and names.
    """
    if isinstance(given, Action):
        heads: dict[str, object] = {name: given.get(name) for name in HEAD_NAMES}
    elif isinstance(given, Mapping):
        unknown = set(given) - set(HEAD_NAMES)
        if unknown:
            named = ", ".join(sorted(map(str, unknown)))
            raise ValueError(f"action heads are {', '.join(HEAD_NAMES)}, not {named}")
        heads = {head.name: given.get(head.name, head.placeholder) for head in HEADS}
    else:
        rows = _integers("actions", given, joint.rows.device)
        if rows.shape == (num_envs,):
            return joint.action(rows)
        if rows.shape != (num_envs, len(HEADS)):
            raise ValueError(
                f"actions are numbers [{num_envs}] of joint actions or choices [{num_envs}, "
                f"{len(HEADS)}], not {list(rows.shape)}"
            )
        heads = dict(zip(HEAD_NAMES, rows.unbind(1), strict=True))
    choices = {name: _integers(name, value, joint.rows.device) for name, value in heads.items()}
    for name, choice in choices.items():
        if choice.ndim > 1 or choice.numel() not in (1, num_envs):
            raise ValueError(
                f"the {name} head takes a number or one for each of {num_envs} envs, not "
                f"{choice.shape}"
            )
    return Action.from_dict(
        {name: choice.reshape(-1).expand(num_envs) for name, choice in choices.items()},
        batch_size=[num_envs],
    )


def _integers(name: str, value: object, device: torch.device) -> Tensor:
    found = torch.as_tensor(value, device=device)  # type: ignore[arg-type]
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, not {found.dtype}")
    return found.to(torch.int64)


def check_action(action: Action, masks: Masks, raising: bool) -> tuple[Action, Tensor]:
    """`action` with WAIT in the envs where it is not legal, and bool [N], these; ValueError for one
    where `raising`.
    """
    obeyed, legal = obey(action, masks)
    faults = illegal_choices(action, masks) if raising else []
    if faults:
        raise ValueError(faults[0])
    return obeyed, ~legal
