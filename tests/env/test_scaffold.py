"""The scaffold boosts: boosts written by env-step, credit discounted and capped."""

import math

import pytest
import torch
from reward_cases import empty_state, make_attribution

from esper_soa.env.scaffold import hindsight_credit, record_boosts


def test_boosts_are_written_at_the_env_step_of_each_env():
    state = empty_state(2, 2, max_steps=4)
    state = state.replace(signals=state.signals.replace(step=torch.tensor([1, 4])))
    boost = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[0.0, 3.0], [3.0, 0.0]]]).double()
    nothing = torch.zeros(2, 2).double()
    after = record_boosts(
        state, make_attribution(nothing, nothing.bool(), torch.zeros(2).double(), boost)
    )
    assert after.boosts.tolist() == [[[2.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 3.0]]]


def test_every_pair_of_slots_has_its_row():
    state = empty_state(1, 3, max_steps=1)
    state = state.replace(signals=state.signals.replace(step=torch.tensor([1])))
    boost = torch.tensor([[[0.0, 1.0, 2.0], [1.0, 0.0, 12.0], [2.0, 12.0, 0.0]]]).double()
    nothing = torch.zeros(1, 3).double()
    after = record_boosts(
        state, make_attribution(nothing, nothing.bool(), torch.zeros(1).double(), boost)
    )
    assert after.boosts.tolist() == [[[1.0], [2.0], [12.0]]]


def test_one_slot_has_no_pairs():
    state = empty_state(2, 1, max_steps=3)
    nothing = torch.zeros(2, 1).double()
    after = record_boosts(
        state, make_attribution(nothing, nothing.bool(), nothing[:, 0], nothing[:, :, None])
    )
    assert after.boosts.shape == (2, 0, 3)
    credit = hindsight_credit(
        after.boosts, ~nothing.bool(), nothing[:, 0] + 5.0, torch.ones(2).long()
    )
    assert credit.tolist() == [0.0, 0.0]


def test_only_the_pairs_of_the_beneficiary_count_and_only_for_a_gain():
    # pairs (0, 1), (0, 2), (1, 2); env 0: slot 1 was helped by 0 and 2; env 1 did not gain; env 2
    # has no beneficiary
    boosts = torch.tensor([[[0.5], [7.0], [0.25]]]).expand(3, 3, 1)
    beneficiary = torch.tensor([[False, True, False], [False, True, False], [False, False, False]])
    gain = torch.tensor([2.0, -2.0, 2.0]).double()
    credit = hindsight_credit(boosts, beneficiary, gain, torch.ones(3).long())
    assert credit.tolist() == pytest.approx(
        [0.1 * (math.tanh(0.1) + math.tanh(0.05)), 0.0, 0.0], abs=1e-7
    )


def test_credit_has_a_cap():
    boosts = torch.full((1, 1, 5), 9.0)
    beneficiary = torch.tensor([[True, False]])
    assert hindsight_credit(
        boosts, beneficiary, torch.tensor([5.0]).double(), torch.tensor([5])
    ).tolist() == [0.2]


def test_old_boosts_count_less():
    # .1 * tanh(.1 * 2 * 5) = .0762 two env-steps ago
    boosts = torch.tensor([[[0.0, 2.0, 0.0, 0.0]]])
    beneficiary = torch.tensor([[True, False]])
    credit = hindsight_credit(boosts, beneficiary, torch.tensor([5.0]).double(), torch.tensor([4]))
    assert credit.item() == pytest.approx(0.1 * math.tanh(1.0) * 0.995**2, abs=1e-7)
