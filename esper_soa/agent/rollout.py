"""The rollout of one round: observations, actions and rewards [T, N].

The trainer makes one with `new_rollout` and fills it row by row with `write_`; the learner reads
it. Everything is on the device and is allocated once.
"""

from typing import NamedTuple

import torch
from tensordict import TensorClass
from torch import Tensor

from esper_soa.state import Action, Masks
from esper_soa.vocabulary import HEAD_NAMES, NUM_BLUEPRINTS, OP_NAMES, head_sizes


class Row(TensorClass["tensor_only", "frozen"]):  # type: ignore[type-arg, name-defined]
    """One env-step of N envs; with a leading T, a whole rollout."""

    features: Tensor  # float32 [N, F], raw; finite in every row
    blueprints: Tensor  # int64 [N, S], -1 when empty
    masks: Masks
    action: Action  # as sampled
    effective_op: Tensor  # int64 [N], the op, or WAIT where it was not applicable
    log_probs: Tensor  # float32 [N, 8]
    value: Tensor  # float32 [N], in units of normalised return
    reward: Tensor  # float32 [N], normalised; see Learner.fill_rewards_
    terminal: Tensor  # bool [N], the trajectory ends here for good
    # Bool [N], the episode is cut here; the value of the next state stands for the rest.
    truncated: Tensor
    reset: Tensor  # bool [N], the agent's memory was restarted before this env-step
    valid: Tensor  # bool [N], the row counts
    contribution: Tensor  # float32 [N, S], percent points; target of the auxiliary prediction
    contribution_measured: Tensor  # bool [N, S], measured at this very env-step

    @property
    def forced(self) -> Tensor:
        """bool [N]: nothing but WAIT was legal, which always is."""
        return self.masks.op.sum(-1) == 1


class Rollout(NamedTuple):
    """T env-steps of N envs."""

    rows: Row  # [T, N]
    bootstrap: Tensor  # float32 [N], value after the last row, used where it is truncated
    taught: Action | None = None  # int64 [T, N], what a teacher would have done; None without

    @property
    def lesson(self) -> Row:
        """The rows [T, N] that an update learns from: a teacher's actions stand for its own."""
        return self.rows if self.taught is None else self.rows.replace(action=self.taught)


class GatheredRollout(NamedTuple):
    """Fields of a rollout that a learner needs of all envs, [T, N]."""

    reward: Tensor  # and what follows as in Row
    value: Tensor
    terminal: Tensor
    truncated: Tensor
    valid: Tensor
    forced: Tensor
    effective_op: Tensor
    op: Tensor  # int64, as sampled
    bootstrap: Tensor  # [1, N], as in Rollout

    @classmethod
    def of(cls, rollout: Rollout) -> "GatheredRollout":
        """The part of one process: a rollout of its envs."""
        rows = rollout.rows
        same = (getattr(rows, name) for name in cls._fields[:-2])
        return cls._make([*same, rows.action.op, rollout.bootstrap.unsqueeze(0)])


def new_rollout(
    num_steps: int,
    num_envs: int,
    num_slots: int,
    num_features: int,
    device: torch.device,
    num_blueprints: int = NUM_BLUEPRINTS,
) -> Rollout:
    """An empty rollout: zeros everywhere, no row valid, no teacher."""
    lead = (num_steps, num_envs)

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(num_steps, num_envs, *shape, dtype=dtype, device=device)

    sizes = zip(HEAD_NAMES, head_sizes(num_slots, num_blueprints), strict=True)
    masks = {name: zeros(torch.bool, size) for name, size in sizes}
    slot_by_op = zeros(torch.bool, len(OP_NAMES), num_slots)
    flags = {name: zeros(torch.bool) for name in ("terminal", "truncated", "reset", "valid")}
    rows = Row(
        features=zeros(torch.float32, num_features),
        blueprints=zeros(torch.int64, num_slots),
        masks=Masks.from_dict(masks | {"slot_by_op": slot_by_op}, batch_size=lead),
        action=Action.from_dict({name: zeros(torch.int64) for name in HEAD_NAMES}, batch_size=lead),
        effective_op=zeros(torch.int64),
        log_probs=zeros(torch.float32, len(HEAD_NAMES)),
        value=zeros(torch.float32),
        reward=zeros(torch.float32),
        contribution=zeros(torch.float32, num_slots),
        contribution_measured=zeros(torch.bool, num_slots),
        batch_size=lead,
        **flags,  # type: ignore[arg-type]
    )
    return Rollout(rows, torch.zeros(num_envs, device=device))


def write_(rollout: Rollout, t: int, row: Row) -> None:
    """Copy the env-step `row` [N] into place t of the rollout."""
    rollout.rows[t].update_(row)  # type: ignore[arg-type]
