"""The scaffold ledger: boosts written by env-step, credit discounted and capped."""

import pytest
import torch
from reward_cases import empty_state, make_attribution

from esper_soa.env.scaffold import credit_for_boost, hindsight_credit, received_boosts, record_boosts


def test_boosts_are_written_at_the_env_step_of_each_env():
    state = empty_state(2, 2, max_steps=4)
    state = state.replace(signals=state.signals.replace(step=torch.tensor([1, 4])))
    boost = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[0.0, 3.0], [3.0, 0.0]]]).double()
    nothing = torch.zeros(2, 2).double()
    after = record_boosts(state, make_attribution(nothing, nothing.bool(), torch.zeros(2).double(), boost))
    assert after.boosts[0, 0, 1].tolist() == [2.0, 0.0, 0.0, 0.0]
    assert after.boosts[1, 1, 0].tolist() == [0.0, 0.0, 0.0, 3.0]
    assert after.boosts.sum().item() == 10.0


def test_a_beneficiary_receives_what_any_scaffold_gave_it():
    boosts = torch.arange(18.0).view(1, 3, 3, 2)
    assert received_boosts(boosts, torch.tensor([1])).tolist() == [[[2.0, 3.0], [8.0, 9.0], [14.0, 15.0]]]


def test_credit_needs_a_boost_and_a_gain_and_has_a_cap():
    received = torch.full((3, 2, 5), 9.0).double()
    received[1] = -1.0
    credit = hindsight_credit(received, torch.tensor([5.0, 5.0, -5.0]).double(), torch.tensor([5, 5, 5]))
    assert credit.tolist() == [0.2, 0.0, 0.0]


def test_old_boosts_count_less():
    # .1 * tanh(.1 * 2 * 5) = .0762 two env-steps ago
    received = torch.tensor([[[0.0, 2.0, 0.0, 0.0]]]).double()
    credit = hindsight_credit(received, torch.tensor([5.0]).double(), torch.tensor([4]))
    assert credit.item() == pytest.approx(credit_for_boost(torch.tensor(2.0), torch.tensor(5.0)).item() * 0.995**2)
