"""An agent: grows one seed after the other and keeps what has helped, for N envs at once and
without a loop.
"""

import torch
from torch import Tensor

import esper_soa
from esper_soa import AgentContext, Decision, Op, View, as_decision, obey, seed_action

Memory = tuple[Tensor, ...]
NEEDED = 0.5  # percent points of contribution that make a seed worth keeping


@esper_soa.agent("patient")
class Patient:
    """Germinates in turn what may be germinated; a seed of a quarter of the episode is kept or
    pruned.
    """

    def __init__(self, surroundings: AgentContext) -> None:
        self.steps = surroundings.steps

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Seeds germinated so far, int64 [N]."""
        return (torch.zeros(num_envs, dtype=torch.int64, device=device),)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """Per env the first of FOSSILIZE, PRUNE, GERMINATE and ADVANCE that is wanted and legal,
        else WAIT.
        """
        (grown,) = memory
        slots = view.state.slots  # legal: bool [N, 6, S]
        legal = view.masks.slot_by_op
        judged = slots.contribution_known & (slots.seed_age > self.steps // 4)
        useful = slots.contribution >= NEEDED
        early = (view.state.signals.step < 3 * self.steps // 4).unsqueeze(1)
        wanted = {
            Op.FOSSILIZE: judged & useful,
            Op.PRUNE: judged & ~useful,
            Op.GERMINATE: early.expand_as(judged),
            Op.ADVANCE: torch.ones_like(judged),
        }
        op = torch.zeros_like(grown)
        slot = torch.zeros_like(grown)
        for code, where in reversed(wanted.items()):
            possible = where & legal[:, code]
            found = possible.any(1)
            op = torch.where(found, code, op)
            slot = torch.where(found, first(possible), slot)
        action, _ = obey(seed_action(op, slot, nth(view.masks.blueprint, grown)), view.masks)
        return as_decision(action), (grown + (action.op == Op.GERMINATE),)


def first(mask: Tensor) -> Tensor:
    """Index int64 [N] of the first True in a row of mask [N, C]; 0 where there is none."""
    return mask.to(torch.int64).argmax(1)


def nth(mask: Tensor, count: Tensor) -> Tensor:
    """Index int64 [N] of the True number `count` [N], round and round, of a row of mask [N, C]."""
    turn = count % mask.sum(1).clamp(min=1)
    return first(mask & (mask.cumsum(1) == (turn + 1).unsqueeze(1)))
