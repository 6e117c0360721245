import torch

from esper_soa.agent.rollout import new_rollout
from esper_soa.vocabulary import Op

CPU = torch.device("cpu")


def test_a_row_is_forced_where_only_waiting_is_legal():
    row = new_rollout(1, 3, 1, 1, CPU).rows[0]
    row.masks.op[:, Op.WAIT] = True
    row.masks.op[1, Op.PRUNE] = True
    assert row.forced.tolist() == [True, False, True]
