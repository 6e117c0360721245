"""What is told once is read everywhere: masks, actions and orders agree on every op in every
situation of a slot.
"""

from itertools import product

import torch

from esper_soa.config.env import LifecycleConfig
from esper_soa.env.lifecycle import effective_op
from esper_soa.env.masks import LEGAL_STAGES, action_masks
from esper_soa.state import Action, Ramp, Slots, initial
from esper_soa.vocabulary import (
    DETAIL_HEADS,
    HEAD_NAMES,
    HEADS,
    NUM_BLUEPRINTS,
    OP_NAMES,
    STAGE_NAMES,
    AlphaMode,
    Op,
    head_sizes,
)

STAGES = [code for code in range(1, len(STAGE_NAMES)) if STAGE_NAMES[code] != "retired"]
# stage, age, ramp
SITUATIONS = list(product(STAGES, (4, 5), (AlphaMode.HOLD, AlphaMode.UP, AlphaMode.DOWN)))


def test_what_a_mask_offers_an_action_may_do_and_nothing_else() -> None:
    stage, age, mode = torch.tensor(SITUATIONS).T.unsqueeze(2)
    slots = initial(Slots, (len(SITUATIONS), 1), "cpu").replace(stage=stage, seed_age=age)
    ramp = initial(Ramp, (len(SITUATIONS), 1), "cpu").replace(mode=mode)
    cfg = LifecycleConfig(min_prune_age=5)
    offered = action_masks(
        slots, ramp, torch.ones(NUM_BLUEPRINTS, dtype=torch.bool), 0, cfg
    ).slot_by_op[:, :, 0]
    for op, name in enumerate(OP_NAMES):
        heads = {head: torch.zeros(len(SITUATIONS), dtype=torch.int64) for head in HEAD_NAMES}
        action = Action.from_dict(
            heads | {"op": torch.full_like(heads["op"], op)}, batch_size=[len(SITUATIONS)]
        )
        done = effective_op(slots, ramp, action, cfg)
        assert torch.equal(done, torch.where(offered[:, op], op, Op.WAIT)), name
        assert offered[:, op].any(), name
    assert sorted([Op.WAIT, *LEGAL_STAGES]) == list(range(len(OP_NAMES)))


def test_every_head_has_the_choices_placeholder_and_ops_of_the_reference() -> None:
    # name: choices, placeholder, ops that it matters for, whether it is masked down to its
    # placeholder without them
    new = {Op.GERMINATE}
    shape = {Op.GERMINATE, Op.SET_ALPHA_TARGET}
    move = {Op.SET_ALPHA_TARGET, Op.PRUNE}
    found = {
        head.name: (head.choices, head.placeholder, set(head.ops), head.fixed)
        for head in DETAIL_HEADS
    }
    assert found == {
        "blueprint": (13, 0, new, False),
        "style": (4, 2, shape, True),
        "tempo": (3, 1, new, False),
        "alpha_target": (3, 2, shape, True),
        "alpha_speed": (4, 0, move, False),
        "alpha_curve": (5, 0, move, False),
    }
    slot = HEADS[0]
    op = HEADS[-1]
    assert (slot.name, set(slot.ops), op.name, set(op.ops)) == (
        "slot",
        set(range(1, 6)),
        "op",
        set(range(6)),
    )
    assert head_sizes(5) == (5, 13, 4, 3, 3, 4, 5, 6)
