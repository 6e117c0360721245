"""The rules of a seed's life: what an action needs and leaves behind, and a life worked by hand.

Recorded lives, of every stage, ramp and way to prune: tests/parity.
"""

import torch

from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.env.lifecycle import EMPTY_SLOT, apply, effective_op, record_accuracy, tick
from esper_soa.state import Action, Ramp, Slots, initial
from esper_soa.vocabulary import HEAD_NAMES, AlphaMode, Blend, Blueprint, Curve, Op, Stage, Style
from tests.builders.env_records import with_values

MANUAL = LifecycleConfig()
GATES = GatesConfig()
AUTOMATIC = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)
STANDARD = 1
INSTANT = 0  # speed FAST is 3 ticks
SEVENTY = 1
FULL = 2
LINEAR = 0


def act(op=Op.WAIT, num_envs=1, **heads):
    """The same action for every env; heads not named are 0, lists give a choice per env."""
    values = dict.fromkeys(HEAD_NAMES, 0) | heads | {"op": op}
    shape = torch.zeros(num_envs, dtype=torch.int64)
    return Action(
        **{k: torch.as_tensor(v) + shape for k, v in values.items()}, batch_size=[num_envs]
    )


def new_host(num_envs=1, num_slots=1):
    return initial(Slots, (num_envs, num_slots), "cpu"), initial(Ramp, (num_envs, num_slots), "cpu")


def holding(stage, num_slots=1, **fields):
    """One env whose slots are in `stage`; fields of slots, of the ramp with ramp_ before."""
    slots, ramp = new_host(1, num_slots)
    ours = {name: value for name, value in fields.items() if not name.startswith("ramp_")}
    moving = {name[5:]: value for name, value in fields.items() if name not in ours}
    slots = with_values(slots, **({"stage": stage, "blueprint": 3} | ours))
    return slots, with_values(ramp, **moving)


def do(slots, ramp, action, accuracy=50.0, cfg=MANUAL, gates=GATES):
    op = effective_op(slots, ramp, action, cfg)
    accuracies = torch.full(action.op.shape, accuracy, dtype=torch.float64)
    return apply(slots, ramp, action, op, accuracies, gates)


def read(record, *names):
    """The named fields of the only slot."""
    return tuple(getattr(record, name).item() for name in names)


def assert_shows(record, **expected):
    """These fields of the only slot."""
    assert {name: record.get(name).item() for name in expected} == expected


def assert_same(before, after):
    assert (before == after).all()


def env_step(slots, ramp, action, cfg=MANUAL, gates=GATES):
    """Record, act, tick, as in an env-step; seeds in training are healthy, all contribute."""
    slots = record_accuracy(slots, torch.full(action.op.shape, 50.0, dtype=torch.float64))
    live = slots.live
    slots = slots.replace(
        gradient_measured=slots.gradient_measured | live,
        gradient_health=torch.where(live, 1.0, slots.gradient_health),
        contribution_known=slots.contribution_known | live,
    )
    slots, ramp, outcome = do(slots, ramp, action, 50.0, cfg, gates)
    return *tick(slots, ramp, cfg, gates), outcome


def play(slots, ramp, actions, steps, cfg=MANUAL):
    """Env-steps with the actions of {env-step: action}: {env-step: (slots, ramp, success)}."""
    story = {}
    for step in steps:
        slots, ramp, outcome = env_step(slots, ramp, actions.get(step, act()), cfg)
        story[step] = (slots, ramp, outcome.success.item())
    return story


def stages(story):
    return {step: slots.stage.item() for step, (slots, _, _) in story.items()}


def alphas(story):
    return {step: round(slots.alpha.item(), 6) for step, (slots, _, _) in story.items()}


GERMINATE_LINEAR = act(
    Op.GERMINATE, blueprint=3, style=Style.LINEAR_ADD, tempo=STANDARD, alpha_target=FULL
)


def test_a_manual_life_takes_the_steps_of_the_golden_table():
    advance = act(Op.ADVANCE)
    actions = {1: GERMINATE_LINEAR, 2: advance, 11: advance, 12: advance, 16: advance, 17: advance}
    story = play(*new_host(), actions | {18: act(Op.FOSSILIZE)}, range(1, 20))
    # ADVANCE fails at 11 (9 env-steps recorded in TRAINING) and at 16 (alpha .8, still on its way
    # up).
    assert [step for step, (_, _, success) in story.items() if not success] == [11, 16]
    expected = {1: Stage.GERMINATED} | dict.fromkeys(range(2, 12), Stage.TRAINING)
    expected |= dict.fromkeys(range(12, 17), Stage.BLENDING) | {
        17: Stage.HOLDING,
        18: Stage.FOSSILIZED,
    }
    assert stages(story) == expected | {19: Stage.FOSSILIZED}
    expected_alphas = dict.fromkeys(range(1, 12), 0) | {12: 0.2, 13: 0.4, 14: 0.6, 15: 0.8}
    assert alphas(story) == expected_alphas | dict.fromkeys(range(16, 20), 1)
    ages = {step: read(slots, "stage_age", "seed_age") for step, (slots, _, _) in story.items()}
    # An action that changes the stage sets the stage age to 0 after the record of its own env-step.
    assert [ages[step] for step in (1, 2, 11, 12)] == [(0, 0), (0, 1), (9, 10), (0, 11)]
    assert [ages[step] for step in (15, 16, 17, 18, 19)] == [
        (3, 14),
        (4, 15),
        (0, 16),
        (0, 17),
        (1, 18),
    ]
    assert read(story[17][0], "previous_stage", "previous_stage_age") == (Stage.BLENDING, 5)
    assert read(story[15][1], "mode") == (AlphaMode.UP,)
    assert read(story[16][1], "mode") == (AlphaMode.HOLD,)


def test_germinate_fills_an_emptied_slot_with_the_choices_and_nothing_old():
    dirty = [with_values(part, **dict.fromkeys(part.keys(), 1)) for part in new_host()]
    slots, ramp = tick(with_values(dirty[0], stage=Stage.RESETTING), dirty[1], MANUAL, GATES)
    assert_same(new_host()[0], slots)  # the tick empties it
    assert_same(new_host()[1], ramp)
    action = act(Op.GERMINATE, blueprint=5, style=Style.GATED_GATE, tempo=2, alpha_target=SEVENTY)
    slots, ramp, outcome = do(slots, ramp, action, accuracy=42.0)
    chosen = {
        "stage": Stage.GERMINATED,
        "previous_stage": Stage.DORMANT,
        "blueprint": Blueprint.BOTTLENECK,
        "blend": Blend.GATE,
        "style": Style.GATED_GATE,
        "tempo": 8,
        "alpha_goal": 0.7,
        "newborn": True,
        "fresh_momentum": True,
        "accuracy_germination": 42.0,
        "germination_known": True,
    }
    assert {k: getattr(slots, k).item() for k in EMPTY_SLOT} == EMPTY_SLOT | chosen
    assert read(ramp, "alpha", "mode", "length") == (0, AlphaMode.HOLD, 0)
    assert read(outcome, "effective_op", "success", "germinated") == (Op.GERMINATE, True, True)


def test_an_action_touches_its_target_slot_only():
    slots, ramp = new_host(num_envs=2, num_slots=2)
    action = act([Op.GERMINATE, Op.WAIT], num_envs=2, slot=[1, 0], blueprint=3)
    slots, ramp, outcome = do(slots, ramp, action)
    empty = Stage.EMPTY
    young = Stage.GERMINATED
    assert slots.stage.tolist() == [[empty, young], [empty, empty]]
    assert outcome.germinated.tolist() == [True, False]
    assert outcome.success.tolist() == [True, True]  # WAIT always succeeds


def test_an_op_that_another_slot_alone_allows_is_a_wait():
    start = holding([Stage.TRAINING, Stage.EMPTY], 2)
    slots, ramp, outcome = do(*start, act(Op.GERMINATE, slot=0))
    assert_same(start[0], slots)
    assert_same(start[1], ramp)
    assert read(outcome, "effective_op", "success") == (Op.WAIT, False)


def test_a_seed_on_its_way_or_too_young_cannot_be_pruned():
    for fields in ({"seed_age": 4}, {"seed_age": 9, "ramp_mode": AlphaMode.UP}):
        start = holding(Stage.BLENDING, alpha=0.5, ramp_alpha=0.5, ramp_target=1.0, **fields)
        slots, ramp, outcome = do(*start, act(Op.PRUNE))
        assert_same(start[0], slots)
        assert_same(start[1], ramp)
        assert read(outcome, "effective_op", "success") == (Op.WAIT, False)


def test_a_seed_that_its_host_does_not_feel_yet_does_not_fade_out():
    start = holding(Stage.BLENDING, alpha=0.0, ramp_alpha=0.0, seed_age=9)
    slots, ramp, _ = do(*start, act(Op.PRUNE, alpha_speed=2))
    assert_shows(slots, stage=Stage.PRUNED, previous_stage=Stage.BLENDING)
    assert read(ramp, "mode", "length") == (AlphaMode.HOLD, 0)


def test_a_failing_gate_changes_nothing_but_is_no_invalid_action():
    for stage, op in ((Stage.TRAINING, Op.ADVANCE), (Stage.HOLDING, Op.FOSSILIZE)):
        start = holding(stage, stage_age=3)
        slots, ramp, outcome = do(*start, act(op))
        assert_same(start[0], slots)
        assert_same(start[1], ramp)
        assert read(outcome, "effective_op", "success") == (op, False)


def test_entering_blending_starts_the_ramp_chosen_at_germination():
    fields = {
        "stage_age": 10,
        "gradient_measured": True,
        "gradient_health": 1.0,
        "accuracy_current": 61.0,
    }
    start = holding(Stage.TRAINING, style=Style.SIGMOID_ADD, tempo=8, alpha_goal=0.7, **fields)
    slots, ramp, outcome = do(*start, act(Op.ADVANCE))
    assert_shows(slots, stage=Stage.BLENDING, blending_started=True, accuracy_blending_start=61.0)
    assert read(slots, "accuracy_stage_start", "previous_stage_age", "stage_age") == (61.0, 10, 0)
    assert_shows(ramp, target=0.7, length=8, done=0, curve=Curve.SIGMOID, steepness=12.0)
    assert read(ramp, "mode") == (AlphaMode.UP,)
    assert outcome.success.item()


def test_fossilize_sets_full_alpha_and_asks_for_fresh_momentum():
    start = holding(
        Stage.HOLDING, contribution_known=True, germination_known=True, alpha=1.0, ramp_alpha=1.0
    )
    slots, ramp, outcome = do(*start, act(Op.FOSSILIZE))
    assert_shows(
        slots, stage=Stage.FOSSILIZED, alpha=1, fresh_momentum=True, germination_known=False
    )
    assert read(ramp, "alpha") == (1,)
    assert read(outcome, "success", "fossilized") == (True, True)


def test_accuracy_is_recorded_and_counted_for_live_seeds_only():
    slots, _ = holding([Stage.TRAINING, Stage.EMBARGOED, Stage.EMPTY], 3)
    for accuracy in (60.0, 80.0):
        slots = record_accuracy(slots, torch.tensor([accuracy], dtype=torch.float64))
    assert slots.accuracy_initial.tolist() == slots.accuracy_stage_start.tolist() == [[60, 0, 0]]
    assert slots.accuracy_current.tolist() == [[80, 0, 0]]
    assert slots.seed_age.tolist() == slots.stage_age.tolist() == [[2, 0, 0]]
    assert slots.total_improvement.tolist() == [[20, 0, 0]]


def test_the_tick_drops_what_dies_with_a_seed_and_empties_reset_slots():
    flags = ("germination_known", "gradient_ratio_known", "drip_live", "newborn")
    stages = [Stage.TRAINING, Stage.PRUNED, Stage.RESETTING]
    known = dict.fromkeys(flags, True) | {"escrow": 3.0, "contribution": 2.0}
    slots, ramp = tick(*holding(stages, 3, **known), MANUAL, GATES)
    assert slots.stage.tolist() == [[Stage.TRAINING, Stage.EMBARGOED, Stage.EMPTY]]
    assert slots.escrow.tolist() == [[3, 0, 0]]
    for name in flags:
        assert slots.get(name).tolist() == [[True, False, False]]
    assert slots.contribution.tolist() == [[2, 2, 0]]
    assert slots.blueprint.tolist() == [[3, 3, Blueprint.NONE]]
    assert_same(slots[:, 2:], initial(Slots, (1, 1), "cpu"))
