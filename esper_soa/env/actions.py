"""The formats of actions that callers may use; illegal actions never reach an env."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from esper_soa.state import Action, Masks, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, HEAD_NAMES, HEADS, OP_NAMES

ActionLike = Action | Mapping[str, object] | Tensor | np.ndarray
ChoiceNames = Mapping[str, Mapping[str, int]]  # by head: its choices, by name


class JointActions:
    """The distinct combinations of choices, for S slots: `rows` int64 [K, 8] in HEADS order.

    Heads that an op does not read keep their placeholders, so no two rows mean the same. The order
    is that of ops, WAIT first, and within an op that of slots, blueprints, styles and so on.
    """

    def __init__(self, num_slots: int, blueprints: Tensor) -> None:
        """blueprints: bool [P], by code, that may be germinated; its device is the table's."""
        codes = blueprints.nonzero().flatten().tolist()
        every = {head.name: [*range(len(head.names))] for head in HEADS}
        every |= {"slot": [*range(num_slots)], "blueprint": codes}
        rows = list[tuple[int, ...]]()
        for op in range(len(OP_NAMES)):
            choices = every | {"op": [op]}
            rows += product(
                *(choices[head.name] if op in head.ops else [head.placeholder] for head in HEADS)
            )
        self.rows = torch.tensor(rows, dtype=torch.int64, device=blueprints.device)
        columns = dict(zip(HEAD_NAMES, self.rows.unbind(1), strict=True))
        self.op = columns["op"]
        self.slot = columns["slot"]
        # The heads beside slot and op: their choices, and bool [K], rows whose op reads them.
        heads = [(head.name, head.ops) for head in DETAIL_HEADS]
        self.details = [(name, columns[name], stage_in(self.op, ops)) for name, ops in heads]

    def __len__(self) -> int:
        """The number K of rows."""
        return len(self.rows)

    def action(self, index: Tensor) -> Action:
        """The factored action of rows `index` int64 [N]; ValueError for a number that is no row."""
        if bool(((index < 0) | (index >= len(self))).any()):
            raise ValueError(f"joint actions are 0 to {len(self) - 1}, not {index.tolist()}")
        heads = dict(zip(HEAD_NAMES, self.rows[index].unbind(1), strict=True))
        return Action.from_dict(heads, batch_size=index.shape)

    def mask(self, masks: Masks) -> Tensor:
        """bool [N, K]: the rows that are legal; `masks` [N] as in a View."""
        legal = masks.op[:, self.op] & masks.slot_by_op[:, self.op, self.slot]
        for name, choice, relevant in self.details:
            legal = legal & (masks.get(name)[:, choice] | ~relevant)
        return legal


def choice_names(slots: Sequence[str], blueprints: Sequence[str], legal: Tensor) -> ChoiceNames:
    """Names that an action may use; blueprints: by code, legal: bool [P], may be germinated."""
    codes = legal.nonzero().flatten().tolist()
    named = {head.name: head.names for head in HEADS} | {"slot": slots}
    choices = {
        head: {name: code for code, name in enumerate(names)} for head, names in named.items()
    }
    return choices | {"blueprint": {blueprints[code]: code for code in codes}}


def read_action(action: ActionLike, count: int, joint: JointActions, names: ChoiceNames) -> Action:
    """`action` as a record [N].

    action: an Action; or choices by head, the same for all envs or a sequence [N], each a number or
    a name of `names`, where heads that are left out keep their placeholders; or int [N, 8] in HEADS
    order; or int [N] of joint actions. Raises ValueError for other shapes, types and names.
    """
    if isinstance(action, Action):
        heads: dict[str, object] = {name: action.get(name) for name in HEAD_NAMES}
    elif isinstance(action, Mapping):
        unknown = ", ".join(sorted(map(str, set(action) - set(HEAD_NAMES))))
        if unknown:
            raise ValueError(f"action heads are {', '.join(HEAD_NAMES)}, not {unknown}")
        heads = {head.name: head.placeholder for head in HEADS}
        heads |= {head: _numbers(head, value, names[head]) for head, value in action.items()}
    else:
        rows = _integers("actions", action, joint.rows.device)
        if rows.shape == (count,):
            return joint.action(rows)
        if rows.shape != (count, len(HEADS)):
            allowed = f"numbers [{count}] of joint actions or choices [{count}, {len(HEADS)}]"
            raise ValueError(f"actions are {allowed}, not {list(rows.shape)}")
        heads = dict(zip(HEAD_NAMES, rows.unbind(1), strict=True))
    choices = {name: _integers(name, value, joint.rows.device) for name, value in heads.items()}
    for name, choice in choices.items():
        if choice.ndim > 1 or choice.numel() not in (1, count):
            allowed = f"a number or one for each of {count} envs"
            raise ValueError(f"the {name} head takes {allowed}, not {choice.shape}")
    each = {name: choice.reshape(-1).expand(count) for name, choice in choices.items()}
    return Action.from_dict(each, batch_size=[count])


def _numbers(head: str, value: object, names: Mapping[str, int]) -> object:
    """`value` with the number of the choice for each name."""
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{head}={value!r}: must be one of {', '.join(names)}")
        return names[value]
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_numbers(head, item, names) for item in value]
    return value


def _integers(name: str, value: object, device: torch.device) -> Tensor:
    try:
        numbers = torch.as_tensor(value, device=device)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:  # texts, None, lists of several lengths
        raise ValueError(f"{name} must be integers, not {value!r}") from error
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, not {numbers.dtype}")
    return numbers.to(torch.int64)
