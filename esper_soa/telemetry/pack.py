"""One env-step of N envs as one table of numbers [N, C], on the device; rows.py takes it apart on
the host.

Which numbers there are is said here alone, as tables of names and of where each comes from. Called
by ops/collect.py once per env-step; it waits for nothing.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.agent.distribution import head_masks
from esper_soa.env.env import Seen
from esper_soa.env.step import StepResult
from esper_soa.state import STATE_FLOAT, Decision
from esper_soa.telemetry.schema import REWARD_TERMS
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES


class Facts(NamedTuple):
    """What an env-step showed, what was decided, and what became of it."""

    seen: Seen
    decision: Decision
    result: StepResult
    # Float32 [N, X] of all choices in HEADS order; None = not asked or not known.
    probabilities: Tensor | None = None


Part = Mapping[str, Callable[[Facts], Tensor]]
TERMS = REWARD_TERMS


def _chosen(head: str) -> Callable[[Facts], Tensor]:
    """What reads the choice of a head."""
    return lambda one: one.decision.action.get(head)


# [N] each; numbers of one table have one dtype.
ENV_CODES: Part = {
    **{name: _chosen(name) for name in HEAD_NAMES},
    "effective_op": lambda one: one.result.outcome.effective_op,
    "reason": lambda one: one.seen.observed.state.guard.reason,
    "ending": lambda one: one.result.state.ending.cause,
}
ENV_FLAGS: Part = {
    "over": lambda one: one.seen.observed.state.ending.over,
    "success": lambda one: one.result.outcome.success,
    "panic": lambda one: one.seen.observed.state.guard.panic,
    "total_known": lambda one: one.seen.observed.attribution.total_known,
}
ENV_NUMBERS: Part = {
    "accuracy": lambda one: one.seen.observed.state.signals.val_accuracy,
    "val_loss": lambda one: one.seen.measured.val_loss,
    "train_loss": lambda one: one.seen.measured.train_loss,
    "train_accuracy": lambda one: one.seen.measured.train_accuracy,
    "total_contribution": lambda one: one.seen.observed.attribution.total,
    "committed_accuracy": lambda one: one.seen.observed.attribution.committed,
}
OVER = len(ENV_CODES) + list(ENV_FLAGS).index("over")  # column of `pack`
# [N, S] each.
SLOT_CODES: Part = {
    "stage": lambda one: one.seen.observed.state.slots.stage,
    "stage_age": lambda one: one.seen.observed.state.slots.stage_age,
    "seed_age": lambda one: one.seen.observed.state.slots.seed_age,
    "blueprint": lambda one: one.seen.observed.state.slots.blueprint,
    "blend": lambda one: one.seen.observed.state.slots.blend,
    "stage_after": lambda one: one.result.state.slots.stage,
    "blueprint_after": lambda one: one.result.state.slots.blueprint,
}
SLOT_FLAGS: Part = {
    "measured": lambda one: one.seen.observed.attribution.measured,
    "gradient_measured": lambda one: one.seen.measured.gradients.measured,
    "gradient_ratio_known": lambda one: one.seen.observed.state.slots.gradient_ratio_known,
    "gradient_vanishing": lambda one: one.seen.observed.state.slots.gradient_vanishing,
    "gradient_exploding": lambda one: one.seen.observed.state.slots.gradient_exploding,
}
SLOT_NUMBERS: Part = {
    "alpha": lambda one: one.seen.observed.state.slots.alpha,
    "alpha_target": lambda one: one.seen.observed.state.ramp.target,
    "alpha_target_after": lambda one: one.result.state.ramp.target,
    "contribution": lambda one: one.seen.observed.attribution.contribution,
    "contribution_velocity": lambda one: one.seen.observed.state.slots.contribution_velocity,
    "interaction": lambda one: one.seen.observed.attribution.interaction_sum,
    "shapley": lambda one: one.seen.observed.attribution.shapley,
    "shapley_error": lambda one: one.seen.observed.attribution.shapley_error,
    "accuracy_initial": lambda one: one.seen.observed.state.slots.accuracy_initial,
    "accuracy_current": lambda one: one.seen.observed.state.slots.accuracy_current,
    "gradient_norm": lambda one: one.seen.observed.state.slots.gradient_norm,
    "gradient_ratio": lambda one: one.seen.observed.state.slots.gradient_ratio,
    "gradient_health": lambda one: one.seen.observed.state.slots.gradient_health,
    "escrow": lambda one: one.seen.observed.state.slots.escrow,
}


def pack(facts: Facts, full: bool) -> Tensor:
    """float64 [N, C]: all that the tables of a level say of an env-step; `full` for the level of
    that name.

    The same columns in every env-step of a run.
    """
    parts = [
        *(
            torch.stack([read(facts) for read in part.values()], 1)
            for part in (ENV_CODES, ENV_FLAGS, ENV_NUMBERS)
        ),
        torch.stack([facts.result.terms.get(name) for name in (*TERMS, "total")], 1),
        facts.decision.log_probs,
        facts.decision.value.unsqueeze(1),
        facts.seen.observed.masks.op,
        (facts.seen.measured.subset >= 0).sum(1, keepdim=True),
        *(
            torch.stack([read(facts) for read in part.values()], 1)
            for part in (SLOT_CODES, SLOT_FLAGS, SLOT_NUMBERS)
        ),
    ]
    if full:
        parts += _details(facts)
    return torch.cat([part.flatten(1).to(STATE_FLOAT) for part in parts], 1)


def _details(facts: Facts) -> list[Tensor]:
    """What the level `full` adds: choices with their masks, and the subsets that were validated."""
    legal = head_masks(facts.seen.observed.masks, facts.decision.action.op)
    masks = torch.cat(list(legal.values()), 1)
    unknown = torch.full_like(masks, torch.nan, dtype=torch.float32)
    likely = facts.probabilities if facts.probabilities is not None else unknown
    return [masks, likely, facts.seen.measured.subset, facts.seen.measured.accuracy]


def still_played(numbers: np.ndarray) -> np.ndarray:
    """bool [..., N], of numbers [..., N, C] of `pack`: envs whose episode was not over before the
    env-step.
    """
    return numbers[..., OVER] == 0


def ended(numbers: np.ndarray) -> np.ndarray:
    """Numbers [N, C] of `pack` of envs whose episodes are all over."""
    numbers = numbers.copy()
    numbers[:, OVER] = 1
    return numbers


def places(num_slots: int, num_choices: int, num_columns: int) -> dict[str, slice]:
    """Which of the C columns of `pack` hold what, for S slots and X choices; those of slots begin
    with `slot.`.
    """
    sizes = {name: 1 for part in (ENV_CODES, ENV_FLAGS, ENV_NUMBERS) for name in part}
    sizes |= {f"reward_{name}": 1 for name in TERMS} | {"reward": 1}
    sizes |= {"log_probs": len(HEAD_NAMES), "value": 1, "legal": len(OP_NAMES), "subsets": 1}
    sizes |= {
        f"slot.{name}": num_slots
        for part in (SLOT_CODES, SLOT_FLAGS, SLOT_NUMBERS)
        for name in part
    }
    left = num_columns - sum(sizes.values())
    if left:
        subsets = (left - 2 * num_choices) // 2
        sizes |= {
            "masks": num_choices,
            "probabilities": num_choices,
            "subset": subsets,
            "subset_accuracy": subsets,
        }
    found = {}
    last = 0
    for name, size in sizes.items():
        found[name] = slice(last, last + size)
        last += size
    return found
