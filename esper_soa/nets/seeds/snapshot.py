"""Snapshots of every host's weights, restored after divergence, and copies of whole envs.

A snapshot holds hosts with their running statistics and the rows of fossils; it is allocated once,
among the weights. A pass over all weights costs more than anything else of the state machine, and
as a rule no env is at stake: on a CPU, which can look at masks for nothing, only those rows move.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.model.host import HostShape
from esper_soa.state import known_false

HOST_ROWS = ("params", "statistics")


def add_snapshot_(weights: TensorDict) -> None:
    """Give `weights` (pools.allocate) room for one snapshot, all zero, with no fossil in it."""
    host = weights["host"]
    rows = {name: torch.zeros_like(host[name]) for name in HOST_ROWS}
    seeds = {name: torch.zeros_like(pool["params"]) for name, pool in weights["seeds"].items()}
    fossil = torch.zeros(len(host), len(seeds), dtype=torch.bool, device=host["params"].device)
    content = {**rows, "seeds": seeds, "fossil": fossil}
    weights["snapshot"] = TensorDict(content, batch_size=host.batch_size)


def snapshot_where_(
    weights: TensorDict, shape: HostShape, where: Tensor, fossil: Tensor, rising: Tensor
) -> None:
    """Keep hosts and fossils of the envs `where` (bool [N]); fossil: bool [N, S], who holds one.

    rising: bool [N, S], seeds of any env that may become fossils before the next snapshot; their
    rows are kept too, but belong to no snapshot. A host with anything in it that is not finite is
    passed over: what is kept is finite.
    """
    host = weights["host"]
    snapshot = weights["snapshot"]
    if not known_false(where):
        for name in HOST_ROWS:
            where = where & host[name].isfinite().all(1)
    for name in HOST_ROWS:
        _copy_where_(snapshot[name], host[name], where)
    for slot, spec in enumerate(shape.slots):
        is_changed = (where & fossil[:, slot]) | rising[:, slot]
        params = weights["seeds", spec.name, "params"]
        _copy_where_(snapshot["seeds", spec.name], params, is_changed)
    _copy_where_(snapshot["fossil"], fossil, where)


def restore_where_(
    weights: TensorDict, shape: HostShape, where: Tensor, fossil: Tensor, broken: Tensor
) -> None:
    """Put the envs `where` (bool [N]) back to their snapshots, all momentum cleared.

    fossil: bool [N, S], slots that hold one. A fossil younger than the snapshot stays as it is,
    except where weights are `broken` (bool [N]): there it goes back to what it was when it became
    a fossil, as it may be NaN now. Other seeds do not outlive a rollback; their rows become zero,
    so that sleeping rows stay finite.
    """
    if known_false(where):
        return
    host = weights["host"]
    snapshot = weights["snapshot"]
    for name in HOST_ROWS:
        _copy_where_(host[name], snapshot[name], where)
    host["momentum"].masked_fill_(where[:, None], 0.0)
    for slot, spec in enumerate(shape.slots):
        pool = weights["seeds", spec.name]
        is_fossil = fossil[:, slot]
        back = where & (snapshot["fossil"][:, slot] | broken)
        _copy_where_(pool["params"], snapshot["seeds", spec.name], back)
        pool["params"].masked_fill_((where & ~is_fossil)[:, None], 0.0)
        pool["momentum"].masked_fill_(where[:, None], 0.0)


def _copy_where_(target: Tensor, source: Tensor, where: Tensor) -> None:
    if where.device.type == "cpu":
        rows = where.nonzero().squeeze(1)
        target[rows] = source[rows]
    else:
        torch.where(where[:, None], source, target, out=target)


def copy_envs_(weights: TensorDict, origin: TensorDict, source: Tensor, where: Tensor) -> None:
    """Give the envs `where` (bool [N]) all rows of the envs source[i] (int64 [N]) of `origin`,
    which may be `weights`: hosts, seeds, momentum, snapshots.
    """
    givers = origin.flatten_keys(".")
    for name, rows in weights.flatten_keys(".").items():
        given = givers[name]
        if source.device.type == "cpu":
            rows[where] = given[source[where]]
        else:
            among = where.view(-1, *[1] * (rows.ndim - 1))
            torch.where(among, given.index_select(0, source), rows, out=rows)
