import torch

from esper_soa.agent.rollout import new_rollout, stack_action
from esper_soa.vocabulary import HEAD_NAMES, Op

CPU = torch.device("cpu")


def test_a_row_is_forced_where_only_waiting_is_legal():
    row = new_rollout(1, 3, 1, 1, CPU).rows[0]
    row.masks.op[:, Op.WAIT] = True
    row.masks.op[1, Op.PRUNE] = True
    assert row.forced.tolist() == [True, False, True]


def test_actions_are_stacked_in_the_order_of_the_heads():
    action = new_rollout(1, 2, 1, 1, CPU).rows[0].action
    for i, name in enumerate(HEAD_NAMES):
        action.get(name).fill_(i)
    assert stack_action(action).tolist() == [list(range(len(HEAD_NAMES)))] * 2
