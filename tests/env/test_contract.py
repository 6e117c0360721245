"""What holds in every env-step, whoever plays: shapes, legal stages and choices, finite numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from esper_soa.agent.scripted import HeuristicPolicy, RandomPolicy, SchedulePolicy
from esper_soa.config.env import REWARD_MODES, RewardConfig
from esper_soa.env.step import apply_action, guard_, look, measure_, record_and_observe
from esper_soa.state import Action, EnvState, Masks, Measurements
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES, STAGE_NAMES, Op, Stage, head_sizes
from tests.builders.tiny_world import (
    EnvStep,
    observed_of,
    play_state,
    tiny_rules,
    tiny_settings,
    tiny_world,
)

# Stages that may follow one another; RESETTING ends in EMPTY, where a seed is germinated.
TRANSITIONS = {
    Stage.EMPTY: (Stage.GERMINATED,),
    Stage.GERMINATED: (Stage.TRAINING, Stage.PRUNED),
    Stage.TRAINING: (Stage.BLENDING, Stage.PRUNED),
    Stage.BLENDING: (Stage.HOLDING, Stage.PRUNED),
    Stage.HOLDING: (Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED),
    Stage.FOSSILIZED: (),
    Stage.PRUNED: (Stage.EMBARGOED,),
    Stage.EMBARGOED: (Stage.RESETTING,),
    Stage.RESETTING: (Stage.EMPTY,),
}
LEGAL = torch.zeros(len(STAGE_NAMES), len(STAGE_NAMES), dtype=torch.bool)
for before, successors in TRANSITIONS.items():
    LEGAL[before, list(successors)] = True


def layout(record: EnvState) -> dict[str, tuple[torch.dtype, torch.Size]]:
    leaves = record.to_tensordict().flatten_keys(".")
    return {name: (value.dtype, value.shape) for name, value in leaves.items()}


def assert_finite(record: TensorDict) -> None:
    for name, value in record.flatten_keys(".").items():
        assert value.isfinite().all(), name


def assert_state_holds(state: EnvState) -> None:
    assert_finite(state.to_tensordict())
    slots = state.slots
    ramp = state.ramp
    for alpha in (slots.alpha, ramp.alpha, ramp.start, ramp.target):
        assert ((alpha >= 0) & (alpha <= 1)).all()
    assert ((slots.alpha == 0) | slots.running).all(), "a seed that is not run has no weight"
    assert ((slots.blueprint >= 0) | ~slots.live).all(), "a live seed has a blueprint"
    assert (slots.blueprint[slots.empty] == -1).all()
    assert ((ramp.done <= ramp.length) & (ramp.done >= 0)).all()
    for counter in (slots.stage_age, slots.seed_age, slots.contribution_age):
        assert (counter >= 0).all()
    resting = LEGAL[slots.stage].any(-1) | (slots.stage == Stage.FOSSILIZED)
    assert resting.all(), "a stage that no slot may rest in"


def assert_masks_hold(masks: Masks, num_slots: int) -> None:
    assert masks.op[:, Op.WAIT].all()
    for name, size in zip(HEAD_NAMES, head_sizes(num_slots), strict=True):
        mask = masks.get(name)
        assert mask.dtype == torch.bool
        assert mask.shape[1:] == (size,), name
        assert mask.any(-1).all(), name
    taken = masks.slot_by_op.any(-1)
    assert torch.equal(masks.op[:, 1:], taken[:, 1:]), "an op is legal where some slot takes it"


def assert_action_obeys(masks: Masks, action: Action) -> None:
    envs = torch.arange(action.op.shape[0])
    assert masks.op[envs, action.op].all()
    assert (masks.slot_by_op[envs, action.op, action.slot] | (action.op == Op.WAIT)).all()


def assert_rows_hold(measured: Measurements, state: EnvState) -> None:
    subset = measured.subset
    ablated = measured.ablated
    bits = 1 << torch.arange(ablated.shape[1])
    full = torch.where(ablated, bits, 0).sum(1)
    evaluated = subset >= 0
    assert (ablated <= (state.slots.running & (state.slots.alpha > 0))).all()
    assert torch.equal(subset[:, 0], full), "row 0 has every ablated seed on"
    assert ((subset & ~full[:, None]) == 0)[evaluated].all(), "a row switches ablated seeds only"
    for row, mask, slots in zip(subset.tolist(), full.tolist(), ablated.tolist(), strict=True):
        codes = [code for code in row if code >= 0]
        assert len(set(codes)) == len(codes), "no subset twice"
        assert 0 in codes
        wanted = [mask - (1 << slot) for slot, there in enumerate(slots) if there]
        assert set(wanted) <= set(codes), "every seed is left out once"
    accuracy = measured.accuracy[evaluated]
    assert ((accuracy >= 0) & (accuracy <= 100)).all()
    assert_finite(measured.gradients.to_tensordict())


def assert_env_step_holds(step: EnvStep, num_slots: int) -> None:
    observed = step.observed
    result = step.result
    assert_rows_hold(step.measured, step.before)
    assert torch.equal(observed.attribution.measured, step.trusted.ablated)
    assert_finite(observed.attribution.to_tensordict())
    assert_masks_hold(observed.view.masks, num_slots)
    assert_action_obeys(observed.view.masks, step.action)
    assert observed.view.observation.features.dtype == torch.float32
    assert_finite(observed.view.observation.to_tensordict())
    assert_finite(result.terms.to_tensordict())
    # looking changes no stage
    assert torch.equal(step.before.slots.stage, observed.view.state.slots.stage)
    assert_state_holds(observed.view.state)
    assert_state_holds(result.state)
    assert_transitions_hold(observed.view.state, result.state)


def assert_transitions_hold(before: EnvState, after: EnvState) -> None:
    """An env-step is an action and a tick, so at most two transitions; the last one's start is
    remembered.
    """
    was = before.slots.stage
    now = after.slots.stage
    start = after.slots.previous_stage
    # a germination passes through DORMANT
    start = torch.where(start == Stage.DORMANT, Stage.EMPTY, start)
    start = torch.where(now == Stage.EMPTY, was, start)  # an empty slot remembers nothing
    moved = was != now
    assert LEGAL[start, now][moved].all(), "illegal last transition"
    assert ((start == was) | LEGAL[was, start])[moved].all(), "illegal first transition"


@pytest.mark.parametrize(
    ("num_envs", "num_slots", "steps"), [(1, 1, 30), (8, 3, 60), (60, 10, 30), (1, 10, 1)]
)
def test_random_legal_play_keeps_the_contract_of_the_state(
    num_envs: int, num_slots: int, steps: int
) -> None:
    first = None
    stages = []
    ops = set()
    rollbacks = 0
    for step in play_state(tiny_rules(num_slots, steps), num_envs, seed=num_slots):
        first = first or layout(step.before)
        assert layout(step.view.state) == first
        assert layout(step.result.state) == first
        assert_env_step_holds(step, num_slots)
        stages.append(step.view.state.slots.stage)
        rollbacks += int(step.before.guard.panic.sum())
        ops |= set(step.action.op[step.result.outcome.success].tolist())
    if num_envs > 1:
        assert ops == set(range(len(OP_NAMES))), "the play was too tame to mean anything"
        assert set(torch.stack(stages).unique().tolist()) == set(TRANSITIONS)
        assert rollbacks > 0


@given(
    seed=st.integers(0, 10_000),
    num_slots=st.sampled_from([1, 2, 3, 5]),
    mode=st.sampled_from(REWARD_MODES),
)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_the_contract_holds_for_any_seed_and_reward(seed: int, num_slots: int, mode: str) -> None:
    for step in play_state(tiny_rules(num_slots, 12, RewardConfig(mode=mode)), 3, seed):
        assert_env_step_holds(step, num_slots)


@pytest.mark.parametrize("name", ["heuristic", "schedule"])
def test_scripted_policies_obey_the_masks(name: str) -> None:
    cfg = tiny_settings(4, 3, 20)
    made = {"heuristic": HeuristicPolicy, "schedule": SchedulePolicy}[name]
    agent = made(vars(cfg.policy)[name], cfg.task.blueprints)
    for step in play_state(tiny_rules(3, 20), 4, seed=1, agent=agent):
        assert_env_step_holds(step, 3)


@pytest.mark.parametrize(("num_envs", "num_slots", "steps"), [(3, 3, 24), (2, 10, 12), (1, 3, 1)])
def test_random_legal_play_keeps_the_contract_of_the_whole_world(
    num_envs: int, num_slots: int, steps: int
) -> None:
    world = tiny_world(num_envs, num_slots, steps)
    agent = RandomPolicy()
    rules = world.rules
    state = world.start_round(0)
    shape = layout(state)
    stages = []
    for index in range(steps):
        before, measured = measure_(rules, world.weights, state, world.work(index))
        before, trusted = guard_(rules, world.weights, before, measured)
        recorded = record_and_observe(rules, before, trusted)
        observed = observed_of(recorded, trusted, 7 * index)
        decision, _ = agent.act(observed.view, ())
        result = apply_action(rules, *recorded[:2], decision.action)
        assert layout(result.state) == shape
        step = EnvStep(measured, before, observed, decision.action, result)
        assert_env_step_holds(step, num_slots)
        assert_finite(world.weights)
        state = result.state
        stages.append(state.slots.stage)
    masks, observation = look(rules, state)
    assert_masks_hold(masks, num_slots)
    assert_finite(observation.to_tensordict())
    if num_envs > 1:
        first = {Stage.EMPTY, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING}
        assert set(torch.stack(stages).unique().tolist()) >= first
