"""The scaffold boosts: boosts written by env-step, credit discounted and capped."""

import math

import pytest
import torch
from torch import Tensor

from esper_soa.env.reward import hindsight_credit, record_boosts
from esper_soa.state import EnvState
from tests.builders.env_records import empty_state, numbers, with_values
from tests.builders.reward_cases import make_attribution


def recorded(steps: list[int], boost: Tensor, max_steps: int) -> EnvState:
    """Envs at these env-steps after their pair interactions [N, S, S] were recorded."""
    num_envs, num_slots, _ = boost.shape
    state = empty_state(num_envs, num_slots, max_steps)
    state = state.replace(signals=with_values(state.signals, step=steps))
    none = torch.zeros(num_envs, num_slots).double()
    return record_boosts(state, make_attribution(none, none.bool(), none[:, 0], boost))


def credit_of(boosts: list, gain: list[float], step: int, beneficiary: list) -> list[float]:
    """Of envs at `step`, alike but for what their beneficiaries gained."""
    count = len(gain)
    rows = torch.tensor(boosts).expand(count, -1, -1)
    return hindsight_credit(
        rows, torch.tensor(beneficiary), numbers(*gain), torch.full((count,), step)
    ).tolist()


def test_boosts_are_written_at_the_env_step_of_each_env() -> None:
    boost = numbers([[0, 2], [2, 0]], [[0, 3], [3, 0]])
    assert recorded([1, 4], boost, 4).boosts.tolist() == [[[2, 0, 0, 0]], [[0, 0, 0, 3]]]


def test_every_pair_of_slots_has_its_row() -> None:
    boost = numbers([[0, 1, 2], [1, 0, 12], [2, 12, 0]])
    assert recorded([1], boost, 1).boosts.tolist() == [[[1], [2], [12]]]
    assert recorded([1, 1], torch.zeros(2, 1, 1), 3).boosts.shape == (2, 0, 3)  # one slot: no pairs
    none = torch.zeros(1, 0, 3)
    assert not hindsight_credit(none, torch.tensor([[True]]), numbers(5.0), torch.ones(1)).any()


def test_only_the_pairs_of_the_beneficiary_count_and_only_for_a_gain() -> None:
    # pairs (0, 1), (0, 2), (1, 2); env 0: slot 1 was helped by 0 and 2; env 1 did not gain; env 2
    # has no beneficiary
    helped = [[False, True, False], [False, True, False], [False, False, False]]
    found = credit_of([[0.5], [7.0], [0.25]], [2.0, -2.0, 2.0], 1, helped)
    assert found == pytest.approx([0.1 * (math.tanh(0.1) + math.tanh(0.05)), 0, 0], abs=1e-7)


def test_old_boosts_count_less_and_credit_has_a_cap() -> None:
    # .1 * tanh(.1 * 2 * 5) = .0762 two env-steps ago
    (found,) = credit_of([[0.0, 2.0, 0.0, 0.0]], [5.0], 4, [[True, False]])
    assert found == pytest.approx(0.1 * math.tanh(1.0) * 0.995**2, abs=1e-7)
    assert credit_of([[9.0] * 5], [5.0], 5, [[True, False]]) == [0.2]
