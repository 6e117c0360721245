import torch

from esper_soa.agent.rollout import Row, new_rollout, stack_action, write_
from esper_soa.vocabulary import HEAD_NAMES, Op

CPU = torch.device("cpu")


def numbered(row: Row) -> Row:
    """The same row with a number in every float and integer, True in every flag."""
    return row.apply(
        lambda x: torch.ones_like(x) if x.dtype == torch.bool else torch.full_like(x, 7)
    )


def test_writing_fills_one_env_step_of_every_field_and_no_other():
    rollout = new_rollout(3, 2, 2, 5, CPU)
    write_(rollout, 1, numbered(rollout.rows[0]))
    for key, values in rollout.rows.to_tensordict().items(include_nested=True, leaves_only=True):
        assert values[1].bool().all(), key
        assert not values[[0, 2]].any(), key


def test_writing_keeps_the_storage():
    rollout = new_rollout(3, 2, 2, 5, CPU)
    before = rollout.rows.features.data_ptr()
    row = numbered(rollout.rows[0])
    write_(rollout, 2, row)
    row.features.zero_()
    assert rollout.rows.features.data_ptr() == before
    assert (rollout.rows.features[2] == 7).all()


def test_a_row_is_forced_where_only_waiting_is_legal():
    row = new_rollout(1, 3, 1, 1, CPU).rows[0]
    row.masks.op[:, Op.WAIT] = True
    row.masks.op[1, Op.PRUNE] = True
    assert row.forced.tolist() == [True, False, True]


def test_actions_are_stacked_in_the_order_of_the_heads():
    action = new_rollout(1, 2, 1, 1, CPU).rows[0].action
    for i, name in enumerate(HEAD_NAMES):
        action.get(name).fill_(i)
    assert stack_action(action).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
