"""What is legal: one situation per rule, with the masks worked out by hand."""

import pytest
import torch
from torch._dynamo.utils import counters

from esper_soa.env.config import LifecycleConfig
from esper_soa.env.lifecycle import empty_slots, idle_ramp
from esper_soa.env.masks import MaskRules, SlotFacts, action_masks, legal_choices
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
    slots = empty_slots(*stage.shape, "cpu").replace(
        stage=stage, seed_age=torch.tensor(ages or [[9]]).expand(stage.shape)
    )
    ramp = idle_ramp(*stage.shape, "cpu").replace(
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


def test_a_seed_can_be_pruned_from_its_fifth_env_step_on():
    masks = masks_of([[Stage.TRAINING], [Stage.TRAINING]], ages=[[4], [5]])
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
    masks = masks_of([[Stage.TRAINING, Stage.EMPTY], [Stage.HOLDING, Stage.EMPTY]])
    assert masks.style.tolist() == [[False, False, True, False], [True] * 4]  # SIGMOID_ADD
    assert masks.alpha_target.tolist() == [[False, False, True], [True] * 3]  # FULL


def test_noop_is_never_offered_and_the_other_heads_are_free():
    masks = masks_of([[Stage.EMPTY], [Stage.TRAINING]])
    assert [
        blueprint for blueprint, legal in enumerate(masks.blueprint[1].tolist()) if legal
    ] == list(CNN_BLUEPRINTS)
    for name, size in (("tempo", 3), ("alpha_speed", 4), ("alpha_curve", 5)):
        assert masks.get(name).tolist() == [[True] * size] * 2


def test_a_dormant_slot_is_not_an_empty_one():
    assert legal_ops(masks_of([[Stage.DORMANT]])) == [[Op.WAIT]]


def test_each_of_the_two_shaping_ops_frees_style_and_target():
    masks = masks_of([[Stage.EMPTY], [Stage.HOLDING]])
    assert legal_ops(masks) == [
        [Op.WAIT, Op.GERMINATE],
        [Op.WAIT, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE],
    ]
    assert masks.style.all()
    assert masks.alpha_target.all()


def choices_of(stages, enabled, modes, moving_prunable=False):
    """Masks from the bare facts, of one env whose seeds are old enough."""
    stage = torch.tensor([stages])
    no = torch.zeros(1, 1, dtype=torch.bool)
    facts = SlotFacts(
        stage, torch.full_like(stage, 9), torch.tensor([modes]), torch.tensor([enabled])
    )
    rules = MaskRules(no.long(), 0, 5, no, no | moving_prunable, allowed().unsqueeze(0))
    return legal_choices(facts, rules)


def test_a_slot_that_is_not_enabled_has_no_ops_and_blocks_nothing():
    for stage in (Stage.EMPTY, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING):
        masks = choices_of([stage, Stage.EMPTY], [False, True], [AlphaMode.HOLD] * 2)
        assert masks.slot.tolist() == [[False, True]]
        assert masks.slot_by_op[0].tolist() == [[False, True]] * 2 + [[False, False]] * 4


def test_wait_is_legal_even_where_no_slot_is_enabled():
    assert legal_ops(choices_of([Stage.EMPTY], [False], [AlphaMode.HOLD])) == [[Op.WAIT]]


@pytest.mark.parametrize("mode", [AlphaMode.UP, AlphaMode.DOWN])
def test_a_moving_seed_may_be_pruned_only_where_the_rules_say_so(mode):
    assert legal_ops(choices_of([Stage.BLENDING], [True], [mode])) == [[Op.WAIT, Op.ADVANCE]]
    pruned = choices_of([Stage.BLENDING], [True], [mode], moving_prunable=True)
    assert legal_ops(pruned) == [[Op.WAIT, Op.PRUNE, Op.ADVANCE]]


def test_masks_compile_to_one_graph_and_equal_eager():
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(action_masks, backend="eager", fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        slots = empty_slots(4, 2, "cpu").replace(
            stage=torch.randint(2, 12, (4, 2), generator=generator)
        )
        args = (slots, idle_ramp(4, 2, "cpu"), allowed(), 2, LifecycleConfig())
        ours = compiled(*args)
        theirs = action_masks(*args)
        for name in ("slot_by_op", "op", "style", "blueprint"):
            assert torch.equal(ours.get(name), theirs.get(name))
    assert counters["stats"]["unique_graphs"] == 1


def test_masks_run_on_the_meta_device():
    masks = action_masks(
        empty_slots(2, 3, "meta"), idle_ramp(2, 3, "meta"), allowed("meta"), 2, LifecycleConfig()
    )
    assert masks.slot_by_op.shape == (2, 6, 3)
    assert masks.op.device.type == "meta"
