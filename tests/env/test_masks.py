"""What is legal by settings: limits and gates, and that actions agree with masks. Recorded masks of
all situations: tests/parity.
"""

from itertools import product

import pytest
import torch

from esper_soa.config.env import LifecycleConfig
from esper_soa.env.lifecycle import effective_op
from esper_soa.env.masks import action_masks
from esper_soa.state import Action, Ramp, Slots, initial
from esper_soa.vocabulary import (
    CNN_BLUEPRINTS,
    HEAD_NAMES,
    OP_NAMES,
    STAGE_NAMES,
    AlphaMode,
    Op,
    Stage,
)

STAGES = [code for code in range(1, len(STAGE_NAMES)) if STAGE_NAMES[code] != "retired"]
# stage, age, ramp
SITUATIONS = list(product(STAGES, (4, 5), (AlphaMode.HOLD, AlphaMode.UP, AlphaMode.DOWN)))
EVERY_GATE = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)


def allowed():
    mask = torch.zeros(13, dtype=torch.bool)
    mask[[0, *CNN_BLUEPRINTS]] = True
    return mask


def masks_of(stages, ages=None, max_seeds=0, lifecycle=None):
    """Masks of envs given as rows of stages; seeds are old enough unless told otherwise."""
    stage = torch.tensor(stages)
    slots = initial(Slots, stage.shape, "cpu").replace(
        stage=stage, seed_age=torch.tensor(ages or [[9]]).expand(stage.shape)
    )
    ramp = initial(Ramp, stage.shape, "cpu")
    return action_masks(slots, ramp, allowed(), max_seeds, lifecycle or LifecycleConfig())


@pytest.mark.parametrize("age", [1, 5])
def test_a_seed_can_be_pruned_from_the_age_that_is_set(age):
    lifecycle = LifecycleConfig(min_prune_age=age)
    masks = masks_of([[Stage.TRAINING]] * 2, ages=[[age - 1], [age]], lifecycle=lifecycle)
    assert masks.op[:, Op.PRUNE].tolist() == [False, True]


def test_the_seed_limit_counts_fossils_but_not_cooling_slots():
    # Env 0 holds two live seeds, env 1 one: with a limit of 2 only env 1 may germinate.
    stages = [
        [Stage.FOSSILIZED, Stage.HOLDING, Stage.EMPTY],
        [Stage.FOSSILIZED, Stage.EMPTY, Stage.EMPTY],
    ]
    assert masks_of(stages, max_seeds=2).op[:, Op.GERMINATE].tolist() == [False, True]
    assert masks_of(stages, max_seeds=0).op[:, Op.GERMINATE].tolist() == [True, True]


def test_advance_is_masked_only_when_every_gate_forwards_by_itself():
    two = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True)
    assert masks_of([[Stage.TRAINING]], lifecycle=two).op[0, Op.ADVANCE]
    assert not masks_of([[Stage.TRAINING]], lifecycle=EVERY_GATE).op[0, Op.ADVANCE]


def test_what_a_mask_offers_an_action_may_do_and_nothing_else():
    stage, age, mode = torch.tensor(SITUATIONS).T.unsqueeze(2)
    slots = initial(Slots, stage.shape, "cpu").replace(stage=stage, seed_age=age)
    ramp = initial(Ramp, stage.shape, "cpu").replace(mode=mode)
    cfg = LifecycleConfig(min_prune_age=5)
    offered = action_masks(slots, ramp, allowed(), 0, cfg).slot_by_op[:, :, 0]
    heads = dict.fromkeys(HEAD_NAMES, torch.zeros(len(SITUATIONS), dtype=torch.int64))
    for op, name in enumerate(OP_NAMES):
        chosen = heads | {"op": torch.full_like(heads["op"], op)}
        done = effective_op(slots, ramp, Action(**chosen, batch_size=[len(SITUATIONS)]), cfg)
        assert torch.equal(done, torch.where(offered[:, op], op, Op.WAIT)), name
        assert offered[:, op].any(), name
