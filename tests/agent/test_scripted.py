"""Scripted policies: always legal, and doing what their rules say on env states built by hand."""

import pytest
import torch

from esper_soa.agent.scripted import (
    HeuristicMemory,
    HeuristicPolicy,
    RandomPolicy,
    SchedulePolicy,
    WaitPolicy,
    decay_penalties,
    first_due,
    scripted_policy,
    uniform_choice,
)
from esper_soa.config.agent import HeuristicConfig, PolicyConfig, ScheduleConfig
from esper_soa.config.env import LifecycleConfig
from esper_soa.env.legal import head_masks, obey
from esper_soa.env.masks import action_masks
from esper_soa.env.observation import observe
from esper_soa.state import Action, View
from esper_soa.vocabulary import (
    BLUEPRINT_NAMES,
    CNN_BLUEPRINTS,
    HEAD_NAMES,
    HEADS,
    AlphaMode,
    Blueprint,
    Op,
    Stage,
    Style,
)
from tests.builders.agent_world import noise_of_heads
from tests.builders.env_records import empty_state, with_values

CPU = torch.device("cpu")
CNN = [BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS]
STANDARD = 1
FULL = 2
INSTANT = 0
LINEAR = 0


def view_of(stages, noise=None, slots=None, ramp=None, lifecycle=None, **signals):
    """A View of envs, rows of stages; `slots`, `ramp`, `signals` override fields with a value."""
    num_envs, num_slots = torch.tensor(stages).shape
    state = empty_state(num_envs, num_slots, 25)
    state = state.replace(
        slots=with_values(state.slots, stage=stages, **{"seed_age": 9, **(slots or {})}),
        ramp=with_values(state.ramp, **(ramp or {})),
        signals=with_values(state.signals, **{"step": 10, **signals}),
    )
    allowed = torch.zeros(13, dtype=torch.bool)
    allowed[list(CNN_BLUEPRINTS)] = True
    masks = action_masks(state.slots, state.ramp, allowed, 0, lifecycle or LifecycleConfig())
    if noise is None:
        noise = torch.zeros(num_envs, len(HEADS))
    return View(
        state=state, observation=observe(state, 25), masks=masks, noise=noise, batch_size=[num_envs]
    )


def choices(action, env=0):
    return {name: action.get(name)[env].item() for name in HEAD_NAMES}


def plain(op, **heads):
    """An action of one env: placeholders, slot 0, and the named heads."""
    values = {
        "slot": 0,
        "blueprint": 0,
        "style": Style.SIGMOID_ADD,
        "tempo": STANDARD,
        "alpha_target": FULL,
        "alpha_speed": INSTANT,
        "alpha_curve": LINEAR,
        "op": op,
    }
    placeholders = {head.name: head.placeholder for head in HEADS}
    return placeholders | values | heads


def as_action(values):
    return Action(**{name: torch.tensor([value]) for name, value in values.items()}, batch_size=[1])


def test_a_uniform_choice_splits_the_unit_interval_over_the_legal_entries():
    mask = torch.tensor([[False, True, False, True, True]]).expand(6, 5)
    noise = torch.tensor([0.0, 0.33, 0.34, 0.66, 0.67, 0.9999999])
    assert uniform_choice(mask, noise).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "wish",
    [
        plain(Op.FOSSILIZE, slot=1, blueprint=5, alpha_curve=3),
        plain(Op.GERMINATE, slot=1, blueprint=BLUEPRINT_NAMES.index("lora")),
    ],
)
def test_an_illegal_wish_becomes_wait_with_placeholders(wish):
    action, legal = obey(as_action(wish), view_of([[Stage.TRAINING, Stage.EMPTY]]).masks)
    assert not legal.item()
    assert choices(action) == plain(Op.WAIT)


def test_a_legal_wish_keeps_what_matters_and_loses_the_rest():
    view = view_of([[Stage.EMPTY, Stage.HOLDING]])
    action, legal = obey(
        as_action(plain(Op.PRUNE, slot=1, blueprint=5, tempo=0, alpha_curve=3)), view.masks
    )
    assert legal.item()
    assert choices(action) == plain(Op.PRUNE, slot=1, alpha_curve=3)


def test_random_play_is_legal_and_reaches_every_legal_op():
    generator = torch.Generator().manual_seed(0)
    stages = torch.randint(2, 12, (2000, 3), generator=generator)
    stages = torch.where(stages == 5, Stage.EMPTY, stages)
    view = view_of(stages.tolist(), noise_of_heads(2000, generator=generator))
    decision, _ = RandomPolicy().act(view, ())
    offered = head_masks(view.masks, decision.action.op)
    for name in HEAD_NAMES:
        choice = decision.action.get(name).unsqueeze(1)
        assert offered[name].gather(1, choice).all(), name
    assert decision.action.op.unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert not decision.log_probs.any()
    assert decision.value.shape == (2000,)


def test_random_ops_are_uniform_over_the_legal_ones():
    # HOLDING at rest: WAIT, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, one quarter each.
    noise = torch.zeros(8, len(HEADS))
    noise[:, HEAD_NAMES.index("op")] = torch.arange(8) / 8
    decision, _ = RandomPolicy().act(view_of([[Stage.HOLDING]] * 8, noise), ())
    assert decision.action.op.tolist() == [0, 0, 2, 2, 3, 3, 4, 4]


def test_the_wait_policy_waits():
    decision, _ = WaitPolicy().act(view_of([[Stage.EMPTY], [Stage.HOLDING]]), ())
    assert choices(decision.action, 1) == plain(Op.WAIT)


def schedule_op(policy, stage, step, age, **more):
    """Ops of one env per row of stages, at env-step `step`, with every seed of this age."""
    decision, _ = policy.act(view_of(stage, step=step, slots={"seed_age": age}, **more), ())
    return decision.action.op.tolist(), decision.action.slot.tolist()


def test_the_schedule_follows_its_declared_env_steps():
    seed = {"style": Style.LINEAR_ADD, "tempo": 2, "alpha_target": 0}
    schedule = ScheduleConfig(
        germinate=[3], advance=[1, 4, 5], fossilize=6, blueprint="conv_light", **seed
    )
    policy = scripted_policy(PolicyConfig(name="schedule", schedule=schedule), CNN)
    plan = [
        (2, 0, Stage.EMPTY, Op.WAIT),
        (3, 0, Stage.EMPTY, Op.GERMINATE),
        (4, 1, Stage.GERMINATED, Op.ADVANCE),
        (5, 2, Stage.TRAINING, Op.WAIT),
        (6, 3, Stage.TRAINING, Op.WAIT),
        (7, 4, Stage.TRAINING, Op.ADVANCE),
        (7, 4, Stage.BLENDING, Op.WAIT),
        (8, 5, Stage.HOLDING, Op.WAIT),
        (9, 6, Stage.HOLDING, Op.FOSSILIZE),
        (10, 7, Stage.FOSSILIZED, Op.WAIT),
    ]
    for step, age, stage, op in plan:
        assert schedule_op(policy, [[stage]], step, age)[0] == [op], (step, stage)
    germination, _ = policy.act(view_of([[Stage.EMPTY]], step=3), ())
    assert choices(germination.action) == plain(
        Op.GERMINATE, blueprint=Blueprint.CONV_LIGHT, **seed
    )


def test_what_is_late_is_done_as_soon_as_it_is_legal_and_an_advance_not_listed_never():
    policy = SchedulePolicy(ScheduleConfig(germinate=[3], advance=[1], fossilize=6), CNN)
    stages = (Stage.EMPTY, Stage.EMBARGOED, Stage.GERMINATED, Stage.TRAINING, Stage.HOLDING)
    ops = schedule_op(policy, [[stage] for stage in stages], 30, 20)[0]
    assert ops == [Op.GERMINATE, Op.WAIT, Op.ADVANCE, Op.WAIT, Op.FOSSILIZE]


def test_the_schedule_staggers_slots_and_the_first_that_may_act_does():
    policy = SchedulePolicy(ScheduleConfig(germinate=[1], stagger=2, advance=[2, 2]), CNN)
    # Slot 1 is due to germinate at 1 + 2 = 3, where the seed of slot 0 is due to advance.
    rows = [
        [Stage.TRAINING, Stage.EMPTY],
        [Stage.HOLDING, Stage.EMPTY],
        [Stage.FOSSILIZED, Stage.EMPTY],
    ]
    assert schedule_op(policy, rows, 3, 2) == ([Op.ADVANCE, Op.GERMINATE, Op.GERMINATE], [0, 1, 1])
    assert schedule_op(policy, rows, 2, 2)[0] == [Op.ADVANCE, Op.WAIT, Op.WAIT]
    automatic = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)
    ops = schedule_op(policy, rows, 3, 2, lifecycle=automatic)[0]
    assert ops == [Op.WAIT, Op.GERMINATE, Op.GERMINATE]


def test_slots_beyond_the_list_germinate_one_after_the_other():
    schedule = ScheduleConfig(germinate=[1, 6], stagger=3)
    assert schedule.germination_steps(4) == [1, 6, 9, 12]
    assert schedule.germination_steps(1) == [1]


READY = {"plateau": 3, "stabilized": True}


def heuristic(view, memory=None, **settings):
    """The action of the first env and the memory after it."""
    config = PolicyConfig(name="heuristic", heuristic=HeuristicConfig(**settings))
    policy = scripted_policy(config, CNN)
    memory = policy.start(view.noise.shape[0], CPU) if memory is None else memory
    decision, memory = policy.act(view, memory)
    return choices(decision.action), HeuristicMemory(*memory)


def test_a_plateau_of_a_stable_host_germinates_in_the_first_empty_slot():
    action, memory = heuristic(view_of([[Stage.FOSSILIZED, Stage.EMPTY, Stage.EMPTY]], **READY))
    assert action == plain(Op.GERMINATE, slot=1, blueprint=Blueprint.CONV_LIGHT)
    assert memory.rotation.tolist() == [1]
    action, memory = heuristic(
        view_of([[Stage.FOSSILIZED, Stage.EMPTY, Stage.EMPTY]], **READY), memory
    )
    assert action["blueprint"] == Blueprint.CONV_HEAVY
    assert memory.rotation.tolist() == [2]
    waits, _ = heuristic(view_of([[Stage.EMPTY]], **READY), plateau_steps_to_germinate=4)
    assert waits["op"] == Op.WAIT


@pytest.mark.parametrize(
    ("stage", "facts", "op"),
    [
        (Stage.GERMINATED, {}, Op.ADVANCE),
        (Stage.TRAINING, {"stage_age": 4, "accuracy_stage_start": 2.1}, Op.ADVANCE),
        (Stage.BLENDING, {"stage_age": 5, "accuracy_stage_start": 2.1}, Op.PRUNE),
        (Stage.BLENDING, {"alpha": 0.9}, Op.WAIT),
        (Stage.BLENDING, {"alpha": 1.0}, Op.ADVANCE),
        (Stage.HOLDING, {"contribution": 0.6}, Op.WAIT),
        (Stage.HOLDING, {"contribution": 0.6, "contribution_known": True}, Op.FOSSILIZE),
        (Stage.HOLDING, {"contribution": 0.5, "contribution_known": True}, Op.PRUNE),
        (
            Stage.HOLDING,
            {"contribution": 9.0, "contribution_known": True, "accuracy_initial": 0.1},
            Op.PRUNE,
        ),
    ],
)
def test_a_seed_is_managed_by_its_stage(stage, facts, op):
    action, _ = heuristic(view_of([[Stage.FOSSILIZED, stage]], slots=facts, ramp={"target": 1.0}))
    assert action == plain(op, slot=0 if op == Op.WAIT else 1)


def test_a_prune_penalises_the_blueprint_and_starts_an_embargo():
    useless = {"contribution_known": True, "blueprint": Blueprint.CONV_LIGHT}
    _, memory = heuristic(view_of([[Stage.HOLDING]], slots=useless))
    assert memory.last_prune.tolist() == [10]
    assert memory.penalties[0].nonzero().tolist() == [[Blueprint.CONV_LIGHT]], "it alone"
    assert memory.penalties[0, Blueprint.CONV_LIGHT].item() == 2.0
    assert heuristic(view_of([[Stage.EMPTY]], step=14, **READY), memory)[0]["op"] == Op.WAIT
    assert heuristic(view_of([[Stage.EMPTY]], step=15, **READY), memory)[0]["op"] == Op.GERMINATE


def test_penalised_blueprints_are_passed_over_and_the_least_bad_taken_when_all_are():
    start = HeuristicMemory(*HeuristicPolicy(HeuristicConfig(), CNN).start(1, CPU))
    start = start._replace(last_decay=torch.tensor([99]))
    penalties = start.penalties.clone()
    penalties[0, Blueprint.CONV_LIGHT] = 3.0
    action, memory = heuristic(
        view_of([[Stage.EMPTY]], **READY), start._replace(penalties=penalties)
    )
    assert action["blueprint"] == Blueprint.CONV_HEAVY
    assert memory.rotation.tolist() == [2]
    # All at 4 but norm at 3: norm (3), then attention, conv_heavy, conv_light, depthwise by name.
    penalties = torch.full_like(penalties, 4.0)
    penalties[0, Blueprint.NORM] = 3.0
    for rotation, blueprint in (
        (0, Blueprint.NORM),
        (1, Blueprint.ATTENTION),
        (7, Blueprint.CONV_HEAVY),
    ):
        turned = start._replace(penalties=penalties, rotation=torch.tensor([rotation]))
        action, memory = heuristic(view_of([[Stage.EMPTY]], **READY), turned)
        assert action["blueprint"] == blueprint
        assert memory.rotation.tolist() == [rotation + 1]


def test_penalties_halve_once_per_env_step_and_small_ones_are_dropped():
    memory = HeuristicMemory(*HeuristicPolicy(HeuristicConfig(), CNN).start(1, CPU))
    memory = memory._replace(penalties=torch.tensor([[2.0, 0.21, 0.19]], dtype=torch.float64))
    once = decay_penalties(memory, torch.tensor([1]))
    assert once.penalties.tolist() == [[1.0, 0.105, 0.0]]
    again = decay_penalties(once, torch.tensor([1]))
    assert torch.equal(again.penalties, once.penalties)


def test_a_masked_wish_waits_and_leaves_the_memory_alone():
    # A failing seed whose ramp moves cannot be pruned.
    failing = {"stage_age": 5, "accuracy_stage_start": 2.1, "blueprint": Blueprint.NORM}
    view = view_of([[Stage.BLENDING]], slots=failing, ramp={"target": 1.0, "mode": AlphaMode.UP})
    action, memory = heuristic(view)
    assert action == plain(Op.WAIT)
    assert memory.last_prune.tolist() == [-100]
    assert not memory.penalties.any()


def test_an_op_that_is_due_and_not_legal_leaves_the_turn_to_the_next_slot() -> None:
    view = view_of([[Stage.HOLDING, Stage.EMPTY, Stage.EMPTY]])
    due = torch.tensor([[Op.GERMINATE, Op.WAIT, Op.GERMINATE]])
    blueprints = torch.tensor([[Blueprint.NORM, Blueprint.NORM, Blueprint.CONV_LIGHT]])
    action = choices(first_due(view, due, blueprints, tempo=INSTANT))
    wanted = {"op": Op.GERMINATE, "slot": 2, "blueprint": Blueprint.CONV_LIGHT, "tempo": INSTANT}
    assert wanted.items() <= action.items()
    none = first_due(view, torch.full_like(due, Op.WAIT), blueprints)
    assert choices(none)["op"] == Op.WAIT
