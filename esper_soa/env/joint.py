"""Joint actions: one row per distinct combination of the heads' choices.

Heads that an op does not read keep their placeholders, so no two rows mean the same. The order is
that of ops, and within an op that of slots, blueprints, styles and so on.
"""

from itertools import product

import torch
from torch import Tensor

from esper_soa.state import Action, Masks, stage_in
from esper_soa.vocabulary import DETAIL_HEADS, HEAD_NAMES, HEADS, OP_NAMES


class JointActions:
    """The table for hosts with S slots: `rows` int64 [K, 8] in HEADS order, row 0 is WAIT."""

    def __init__(self, num_slots: int, blueprints: Tensor) -> None:
        """blueprints: bool [P], by code, that may be germinated; its device is the table's."""
        codes = blueprints.nonzero().flatten().tolist()
        rows = [row for op in range(len(OP_NAMES)) for row in _rows(op, num_slots, codes)]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=blueprints.device)
        columns = dict(zip(HEAD_NAMES, self.rows.unbind(1), strict=True))
        self.op = columns["op"]
        self.slot = columns["slot"]
        # Of the heads beside slot and op: their choices, and bool [K], rows whose op reads them.
        heads = [(head.name, head.ops) for head in DETAIL_HEADS]
        self.details = [(name, columns[name], stage_in(self.op, ops)) for name, ops in heads]

    def __len__(self) -> int:
        """K."""
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


def _rows(op: int, num_slots: int, blueprints: list[int]) -> list[tuple[int, ...]]:
    """Every choice of the heads that the op reads, the others at their placeholders."""
    choices: list[list[int]] = []
    for head in HEADS:
        if head.name == "op":
            choices.append([op])
        elif op not in head.ops:
            choices.append([head.placeholder])
        elif head.name == "blueprint":
            choices.append(blueprints)
        else:
            choices.append(list(range(len(head.names) or num_slots)))
    return list(product(*choices))
