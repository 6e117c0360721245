import torch

from esper_soa.agent.rollout import new_rollout
from esper_soa.vocabulary import HEAD_NAMES, Op, head_sizes

CPU = torch.device("cpu")


def test_a_row_is_forced_where_only_waiting_is_legal():
    row = new_rollout(1, 3, 1, 1, CPU).rows[0]
    row.masks.op[:, Op.WAIT] = True
    row.masks.op[1, Op.PRUNE] = True
    assert row.forced.tolist() == [True, False, True]


def test_a_new_rollout_has_a_place_for_every_number_and_nothing_in_it():
    rollout = new_rollout(2, 3, 4, 5, CPU, 15)
    masks = dict(zip(HEAD_NAMES, head_sizes(4, 15), strict=True))
    sizes = {
        **dict.fromkeys(("terminal", "truncated", "reset", "valid"), (torch.bool, ())),
        "features": (torch.float32, (5,)),
        "blueprints": (torch.int64, (4,)),
        "effective_op": (torch.int64, ()),
        "log_probs": (torch.float32, (len(HEAD_NAMES),)),
        **dict.fromkeys(("value", "reward"), (torch.float32, ())),
        "contribution": (torch.float32, (4,)),
        "contribution_measured": (torch.bool, (4,)),
        **{f"action.{name}": (torch.int64, ()) for name in HEAD_NAMES},
        **{f"masks.{name}": (torch.bool, (size,)) for name, size in masks.items()},
        "masks.slot_by_op": (torch.bool, (6, 4)),
    }
    found = rollout.rows.to_tensordict().flatten_keys(".")
    told = {name: (one.dtype, tuple(one.shape[2:])) for name, one in found.items()}
    assert told == sizes
    assert not any(one.any() for one in (*found.values(), rollout.bootstrap))
    assert (rollout.bootstrap.shape, rollout.taught) == ((3,), None)
