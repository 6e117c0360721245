"""What is legal: one situation per rule, with the masks worked out by hand."""

import pytest
import torch

from esper_soa.env.config import LifecycleConfig
from esper_soa.env.masks import action_masks
from esper_soa.state import Ramp, Slots, initial
from esper_soa.vocabulary import CNN_BLUEPRINTS, AlphaMode, Op, Stage

EVERY_GATE = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)


def allowed(device="cpu"):
    mask = torch.zeros(13, dtype=torch.bool, device=device)
    mask[[0, *CNN_BLUEPRINTS]] = True
    return mask


def masks_of(stages, ages=None, modes=None, max_seeds=0, lifecycle=None):
    """Masks of envs given as rows of stages; seeds are old enough and their ramps at rest unless
    told otherwise.
    """
    stage = torch.tensor(stages)
    slots = initial(Slots, stage.shape, "cpu").replace(
        stage=stage, seed_age=torch.tensor(ages or [[9]]).expand(stage.shape)
    )
    ramp = initial(Ramp, stage.shape, "cpu").replace(
        mode=torch.tensor(modes or [[0]]).expand(stage.shape)
    )
    return action_masks(slots, ramp, allowed(), max_seeds, lifecycle or LifecycleConfig())


def legal_ops(masks):
    return [[op for op, legal in enumerate(row) if legal] for row in masks.op.tolist()]


def test_an_empty_host_may_wait_or_germinate_in_any_slot():
    masks = masks_of([[Stage.EMPTY, Stage.EMPTY]])
    assert legal_ops(masks) == [[Op.WAIT, Op.GERMINATE]]
    assert masks.slot_by_op[0, Op.GERMINATE].tolist() == [True, True]
    assert masks.slot_by_op[0, Op.WAIT].tolist() == [True, True]


@pytest.mark.parametrize(
    "stage", [Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING]
)
def test_an_unsettled_or_cooling_slot_blocks_germination_everywhere(stage):
    assert Op.GERMINATE not in legal_ops(masks_of([[stage, Stage.EMPTY]]))[0]


@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED])
def test_a_settled_seed_leaves_the_empty_slot_open(stage):
    masks = masks_of([[stage, Stage.EMPTY]])
    assert masks.slot_by_op[0, Op.GERMINATE].tolist() == [False, True]


def test_each_stage_has_its_ops_on_its_own_slot():
    stages = [
        [Stage.GERMINATED],
        [Stage.TRAINING],
        [Stage.BLENDING],
        [Stage.HOLDING],
        [Stage.FOSSILIZED],
        [Stage.PRUNED],
    ]
    assert legal_ops(masks_of(stages)) == [
        [Op.WAIT, Op.PRUNE, Op.ADVANCE],
        [Op.WAIT, Op.PRUNE, Op.ADVANCE],
        [Op.WAIT, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.ADVANCE],
        [Op.WAIT, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE],
        [Op.WAIT],
        [Op.WAIT],
    ]
    two = masks_of([[Stage.HOLDING, Stage.BLENDING]])
    assert two.slot_by_op[0, Op.FOSSILIZE].tolist() == [True, False]
    assert two.slot_by_op[0, Op.ADVANCE].tolist() == [False, True]


def test_a_moving_ramp_masks_prune_and_a_new_target():
    masks = masks_of([[Stage.BLENDING], [Stage.BLENDING]], modes=[[AlphaMode.UP], [AlphaMode.HOLD]])
    assert legal_ops(masks) == [
        [Op.WAIT, Op.ADVANCE],
        [Op.WAIT, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.ADVANCE],
    ]


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


def test_style_and_target_are_fixed_where_nothing_can_be_shaped():
    masks = masks_of([[Stage.TRAINING], [Stage.HOLDING], [Stage.EMPTY]])
    assert masks.style.tolist() == [[False, False, True, False]] + [[True] * 4] * 2  # SIGMOID_ADD
    assert masks.alpha_target.tolist() == [[False, False, True]] + [[True] * 3] * 2  # FULL


def test_noop_is_never_offered_and_the_other_heads_are_free():
    masks = masks_of([[Stage.EMPTY], [Stage.TRAINING]])
    assert [
        blueprint for blueprint, legal in enumerate(masks.blueprint[1].tolist()) if legal
    ] == list(CNN_BLUEPRINTS)
    for name, size in (("tempo", 3), ("alpha_speed", 4), ("alpha_curve", 5)):
        assert masks.get(name).tolist() == [[True] * size] * 2


def test_a_dormant_slot_is_not_an_empty_one():
    assert legal_ops(masks_of([[Stage.DORMANT]])) == [[Op.WAIT]]


def test_masks_run_on_the_meta_device():
    slots, ramp = (initial(kind, (2, 3), "meta") for kind in (Slots, Ramp))
    masks = action_masks(slots, ramp, allowed("meta"), 2, LifecycleConfig())
    assert masks.slot_by_op.shape == (2, 6, 3)
    assert masks.op.device.type == "meta"
