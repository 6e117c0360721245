"""Joint actions: one row for every choice that does something else, and masks that agree with those
of the heads.
"""

import math
from itertools import chain

import pytest
import torch

from esper_soa.env.actions import JointActions
from esper_soa.env.legal import obey
from esper_soa.vocabulary import HEAD_NAMES, HEADS, OP_NAMES
from tests.builders.tiny_world import play_state, tiny_rules


def table(num_slots: int, codes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)) -> JointActions:
    blueprints = torch.zeros(13, dtype=torch.bool)
    blueprints[list(codes)] = True
    return JointActions(num_slots, blueprints)


def test_rows_are_all_choices_that_differ() -> None:
    joint = table(3)
    # WAIT; slot x blueprint x style x tempo x target; slot x style x target x speed x curve; slot x
    # speed x curve; slot; and the choices of heads that came later
    counts = [1, 3 * 7 * 4 * 3 * 3, 3 * 4 * 3 * 4 * 5, 3 * 4 * 5, 3, 3]
    later = [math.prod(len(head.names) for head in HEADS[8:] if op in head.ops) for op in range(6)]
    wanted = [count * more for count, more in zip(counts, later, strict=True)]
    assert joint.op.bincount().tolist() == wanted
    assert len(joint) == sum(wanted)
    assert len({tuple(row) for row in joint.rows.tolist()}) == len(joint)
    assert joint.rows[0].tolist() == [head.placeholder for head in HEADS]
    few = [1, 2 * 36, 2 * 240, 2 * 20, 2, 2]
    assert len(table(2, (3,))) == sum(count * more for count, more in zip(few, later, strict=True))


@pytest.mark.parametrize(("num_slots", "seed"), [(1, 7), (3, 1)])
def test_a_row_is_legal_where_its_choices_are(num_slots: int, seed: int) -> None:
    """Against every row put to the factored masks, in random play until each op has been legal."""
    rules = tiny_rules(num_slots, 50)
    joint = table(num_slots)
    legal_ops = set[int]()
    for step in chain.from_iterable(play_state(rules, 2, seed + more) for more in range(20)):
        masks = joint.mask(step.view.masks)
        for env in range(2):
            every = step.view.masks[env : env + 1].expand(len(joint)).clone()
            obeyed, legal = obey(joint.action(torch.arange(len(joint))), every)
            assert torch.equal(masks[env], legal)
            kept = torch.stack([obeyed.get(name) for name in HEAD_NAMES], 1)
            # WAIT takes the first legal slot
            heads = [at for at, name in enumerate(HEAD_NAMES) if name != "slot"]
            assert torch.equal(kept[legal][:, heads], joint.rows[legal][:, heads])
            legal_ops |= set(joint.op[legal].tolist())
        if len(legal_ops) == len(OP_NAMES):
            break
    assert legal_ops == set(range(len(OP_NAMES)))


def test_a_number_that_is_no_row_is_refused() -> None:
    joint = table(1)
    for wrong in (-1, len(joint)):
        with pytest.raises(ValueError, match=f"0 to {len(joint) - 1}"):
            joint.action(torch.tensor([0, wrong]))
