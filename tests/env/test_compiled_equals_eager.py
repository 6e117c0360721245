"""Compiled env-step kernels: whole functions, one graph for an episode, numbers as eager."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.env import REWARD_MODES, EarlyStopConfig, RewardConfig
from esper_soa.env.step import (
    EnvRules,
    Recorded,
    StepKernels,
    StepResult,
    Values,
    apply_action,
    compiled,
    initial_state,
    record_and_observe,
)
from esper_soa.state import EnvState
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.vocabulary import Op
from tests.builders.tiny_world import (
    CPU,
    guarded,
    made_up,
    quiet_progress,
    tiny_rules,
    tiny_settings,
    tiny_world,
    view_of,
)

STEPS = 40
# relative; inductor may add up in another order and fuses multiplications with additions
ROUNDING = 1e-12


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs_in_one_piece() -> StepKernels:
    """The kernels as one graph each, executed operator by operator."""
    return StepKernels(
        torch.compile(record_and_observe, fullgraph=True, backend="eager"),
        torch.compile(apply_action, fullgraph=True, backend="eager"),
    )


def assert_same(mine: EnvState, theirs: EnvState, where: str, rounding: float) -> None:
    expected = theirs.to_tensordict().flatten_keys(".")
    for name, value in mine.to_tensordict().flatten_keys(".").items():
        other = expected[name]
        assert value.dtype == other.dtype, f"{where} {name}"
        if rounding and value.is_floating_point():
            torch.testing.assert_close(
                value, other, rtol=rounding, atol=rounding, msg=f"{where} {name}"
            )
        else:
            assert torch.equal(value, other), f"{where} {name}"


def assert_agree(
    mine: Recorded | StepResult, theirs: Recorded | StepResult, where: str, rounding: float
) -> None:
    for place, (value, other) in enumerate(zip(mine, theirs, strict=True)):
        assert_same(value, other, f"{where} {place}", rounding)


def play_both(
    kernels: StepKernels,
    rules: EnvRules,
    num_envs: int,
    rounding: float = 0.0,
    values: Values = (),
) -> Tensor:
    """Play an episode with `kernels`, checking every env-step against eager; returns the successes
    by op, int64 [6].

    The compiled state is carried on, as in a run; eager is given the same inputs.
    """
    agent = RandomPolicy()
    state = initial_state(rules, num_envs, CPU)
    successes = torch.zeros(6, dtype=torch.int64)
    for step in range(rules.max_steps):
        nothing = torch.zeros_like(state.slots.newborn)
        state = state.replace(slots=state.slots.replace(newborn=nothing, fresh_momentum=nothing))
        state, measured = guarded(rules, state, made_up(rules, state, step))
        recorded = kernels.record_and_observe(rules, state, measured, values)
        where = f"env-step {step}:"
        assert_agree(recorded, record_and_observe(rules, state, measured, values), where, rounding)
        action = agent.act(view_of(recorded, step), ())[0].action
        given = (*recorded[:2], action, values)
        result = kernels.apply_action(rules, *given)
        assert_agree(result, apply_action(rules, *given), where, rounding)
        successes += torch.bincount(action.op[result.outcome.success], minlength=6)
        state = result.state
        if step == 0:
            counters_after_first_step = graphs()
    assert graphs() == counters_after_first_step, "something was compiled again during the episode"
    return successes


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_one_graph_per_kernel_serves_all_that_may_be_in_it_and_equals_eager_bit_for_bit() -> None:
    """Modes shared out, a user's own of several terms among them, settings of envs that bound the
    pace of growth, prices, and episodes that end early.
    """
    modes = "[shaped,net,parts_of_users:parts]"
    tiny = tiny_settings(4, 2, 8, RewardConfig(mode=modes, flop_weight="[0,1]"))
    gates = replace(tiny.gates, min_blending_steps="[1,3]")
    lifecycle = replace(tiny.lifecycle, embargo_steps="[1,4]", min_prune_age="[1,4]")
    world = build_world(replace(tiny, gates=gates, lifecycle=lifecycle), CPU)
    rules = world.rules._replace(early_stop=EarlyStopConfig(rollbacks=1))
    assert len(world.kernel_values) == 5
    play_both(graphs_in_one_piece(), rules, 4, values=world.kernel_values)
    assert graphs() == 2


# Of these basic_plus also evaluates fossils and pays from their pools.
@pytest.mark.slow
@pytest.mark.parametrize("mode", REWARD_MODES)
def test_one_graph_per_kernel_serves_a_whole_episode_and_equals_eager_bit_for_bit(
    mode: str,
) -> None:
    rules = tiny_rules(3, STEPS, RewardConfig(mode=mode))
    successes = play_both(graphs_in_one_piece(), rules, 8)
    assert graphs() == 2
    for op in (Op.GERMINATE, Op.ADVANCE, Op.PRUNE, Op.SET_ALPHA_TARGET, Op.FOSSILIZE):
        assert successes[op] > 0, "the episode was too tame to mean anything"


@pytest.mark.slow
def test_a_round_of_a_real_world_needs_no_second_graph() -> None:
    world = tiny_world(3, 2, 16)
    quiet = quiet_progress()
    eager, _ = play_round(world, Player(RandomPolicy(), None), Round(0, quiet))
    world.kernels = graphs_in_one_piece()
    result, _ = play_round(world, Player(RandomPolicy(), None), Round(0, quiet))
    assert graphs() == 2
    assert result.rewards == eager.rewards
    assert result.seeds["blended"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # inductor takes about a minute of one core
@pytest.mark.parametrize("mode", ["shaped", "simplified"])
def test_the_compiled_step_of_a_run_equals_eager(mode: str) -> None:
    play_both(compiled(), tiny_rules(2, 24, RewardConfig(mode=mode)), 8, ROUNDING)
    assert graphs() == 2
