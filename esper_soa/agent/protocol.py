"""The protocol of all agents, learning or scripted.

The memory of an agent is a tuple of tensors with a leading env axis. The caller stores it, and
resets it for envs that begin a new trajectory.
"""

from typing import Protocol

import torch
from torch import Tensor

from esper_soa.state import Decision, View

Memory = tuple[Tensor, ...]  # each [N, ...]; empty for agents that remember nothing


class Agent(Protocol):
    """A decision maker for any number of envs at once."""

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Memory at the start of a trajectory, for every env."""

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """One legal action per env, and the memory after it. Never changes `view` or `memory`."""


def decide(
    agent: Agent, view: View, memory: Memory, openly: bool
) -> tuple[Decision, Memory, Tensor | None]:
    """The agent's decision, and the probability of each choice if requested (`openly`) and known.

    An agent that can tell has `act_with_probabilities`, see RecurrentPolicy.
    """
    if openly and hasattr(agent, "act_with_probabilities"):
        return agent.act_with_probabilities(view, memory)  # type: ignore[no-any-return]
    decision, memory = agent.act(view, memory)
    return decision, memory, None


def restart(memory: Memory, fresh: Memory, reset: Tensor) -> Memory:
    """`memory` with the envs of `reset` (bool [N]) put back to `fresh`, that of the start."""
    return tuple(
        torch.where(reset.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        for old, new in zip(memory, fresh, strict=True)
    )
