"""An agent that keeps what it saw and chose, so that a test can work a round out by itself."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent, Memory
from esper_soa.agent.rollout import Rollout
from esper_soa.env.world import World
from esper_soa.state import Action, Decision, EnvState, View
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round
from esper_soa.training.results.metrics import RoundResult
from tests.builders.tiny_world import quiet_progress


class RecordingAgent:
    """Plays as `agent` does."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.views: list[View] = []
        self.decisions: list[Decision] = []

    def start(self, num_envs: int, device: torch.device) -> Memory:
        return self.agent.start(num_envs, device)

    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        decision, memory = self.agent.act(view, memory)
        self.views.append(view)
        self.decisions.append(decision)
        return decision, memory


class Witnessed(NamedTuple):
    """One round of T env-steps as its agent saw it."""

    # T, of what the actions were decided on; with a learner one more, after the last env-step.
    views: list[View]
    decisions: list[Decision]
    states: list[EnvState]  # T, after the actions took effect
    result: RoundResult
    rollout: Rollout | None

    @property
    def actions(self) -> list[Action]:
        return [decision.action for decision in self.decisions]

    def rewards(self) -> Tensor:
        """Raw rewards float64 [T, N], as the differences of their sums."""
        sums = torch.stack([state.totals.reward for state in self.states])
        return sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))


def witnessed_round(
    world: World,
    agent: Agent,
    number: int,
    learner: Learner | None = None,
    teacher: Agent | None = None,
) -> Witnessed:
    """Play round `number`."""
    recording_agent = RecordingAgent(agent)
    played = Round(number, quiet_progress())
    episode = EpisodeRunner(world, Player(recording_agent, learner, teacher), played)
    states = []
    for _ in range(world.rules.max_steps):
        episode.step_()
        states.append(episode.env.state)
    result, rollout = episode.finish()
    return Witnessed(recording_agent.views, recording_agent.decisions, states, result, rollout)
