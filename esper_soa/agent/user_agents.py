"""User agents: loaded by settings such as policy.name and control, and checked at every call.

An illegal decision ends the run with a message. In a run's first env-steps, a second agent of the
same part is asked again for the same views, and what that finds is logged as a warning.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from tensordict import TensorClass
from torch import Tensor

from esper_soa.agent.protocol import Agent, Memory
from esper_soa.config.nets import SlotSpec
from esper_soa.config.registry import AGENT, Part, collect_faults, find, num_required
from esper_soa.env.legal import illegal_choices
from esper_soa.nets.model.user_parts import tensor_findings
from esper_soa.state import Decision, View
from esper_soa.system.errors import UserError, check
from esper_soa.vocabulary import HEAD_NAMES

LOGGER = logging.getLogger("esper_soa")
NUM_WATCHED = 8  # env-steps in which the second agent is asked
ADVICE = "An agent chooses what view.masks offer; esper_soa.env.legal.obey makes WAIT of all else."


class AgentContext(NamedTuple):
    """Constants of a run, passed to agent factories that take an argument."""

    slots: tuple[SlotSpec, ...]  # in the order of actions
    blueprints: tuple[str, ...]  # names by code; which of them may be germinated is in the masks
    steps: int  # env-steps of an episode
    seed: int  # of the run, for agents that begin at random


class CheckedAgent:
    """Wrapper that checks an agent's decisions: shapes, types, devices, masks.

    Looking at the masks is one read by the host per env-step.
    """

    def __init__(
        self,
        label: str,
        agent: Agent,
        twin: Agent | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """label: how the agent was asked for. twin: a second agent of the same part, asked about
        the first env-steps of its first episode by `conduct_findings`, and then let go. names: of
        slots and blueprints, for messages.
        """
        self.label = label
        self.agent = agent
        self.twin = twin
        self.names = names
        self._left_to_watch = NUM_WATCHED
        self._found = list[str]()  # what was warned of
        self._is_first = True  # env-step of an episode, at which all of the view is looked at

    def start(self, num_envs: int, device: torch.device) -> Memory:
        """The agent's memory; raises UserError for what is no memory of N envs."""
        self._is_first = True
        memory = self.agent.start(num_envs, device)
        self._refuse(memory_faults(memory, num_envs, device))
        if self._left_to_watch < NUM_WATCHED:
            self.twin = None
        if self.twin is not None:
            self.twin.start(num_envs, device)
        return memory

    @torch.no_grad()
    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """The agent's decision and memory; raises UserError for a decision that is not legal."""
        if self.twin is not None:
            self._watch(self.twin, view, memory)
        shown = (view,) if self._is_first else (view.masks, view.observation)
        self._is_first = False
        before = _versions(shown, memory)
        decision, after = self.agent.act(view, memory)
        faults = decision_faults(decision, view)
        if _versions(shown, memory) != before:
            faults = ["it changes the view or its memory in place: it should take x.clone() first"]
        faults += memory_faults(after, view.noise.shape[0], view.noise.device)
        self._refuse(faults or illegal_choices(decision.action, view.masks, self.names))
        return decision, after

    def _watch(self, twin: Agent, view: View, memory: Memory) -> None:
        """Warn of what the twin does wrong in this env-step, each fault once."""
        self._left_to_watch -= 1
        found = list[str]()
        with torch.random.fork_rng(devices=[]), collect_faults(found):
            first = twin.act(view.clone(), copied(memory))
            if not decision_faults(first[0], view):
                found += conduct_findings(twin, view, memory, first=first)
        for finding in found:
            if finding not in self._found:
                LOGGER.warning("parts    %s: %s", self.label, finding)
        self._found += found
        if self._left_to_watch == 0:
            self.twin = None

    def _refuse(self, faults: list[str]) -> None:
        if faults:
            raise UserError(f"{self.label}: {faults[0]}. {ADVICE}")


def _versions(shown: Sequence[TensorClass], memory: Memory) -> list[int]:
    """How often each tensor that an agent is given was written to."""
    tensors = chain(memory, *(part.values(True, True) for part in shown))
    return [tensor._version for tensor in tensors]


def user_agent(reference: str, setting: str, environment: AgentContext) -> CheckedAgent:
    """The agent `module:name` that `setting` names, watched; SettingError where there is none."""
    part = find(AGENT, reference, setting)
    allowed = "called without an argument or with the AgentContext"
    check(num_required(part) <= 1, setting, reference, allowed=allowed, remedy="It wants more.")
    agent = make_agent(part, environment)
    missing = " and no ".join(name for name in ("start", "act") if not hasattr(agent, name))
    problem = f"What it gives, a {type(agent).__name__}, has no {missing}."
    check(not missing, setting, reference, allowed="a factory of agents", remedy=problem)
    slots = [slot.name for slot in environment.slots]
    names = {"slot": slots, "blueprint": environment.blueprints}
    twin = make_agent(part, environment)
    return CheckedAgent(f"{setting}={reference}", agent, twin, names=names)


def make_agent(part: Part, environment: AgentContext) -> Agent:
    """The result of an agent factory, unchecked."""
    return part(environment) if num_required(part) == 1 else part()  # type: ignore[return-value]


def memory_faults(memory: object, num_envs: int, device: torch.device) -> list[str]:
    """Messages on why `memory` is not a valid memory of N envs."""
    if not isinstance(memory, tuple) or not all(isinstance(part, Tensor) for part in memory):
        return [f"its memory is a {type(memory).__name__}, not a tuple of tensors"]
    faults = list[str]()
    for place, part in enumerate(memory):
        faults += tensor_findings(
            f"part {place} of its memory",
            part.detach(),
            [num_envs, *part.shape[1:]],
            dtype=part.dtype,
            device=device,
        )
    return faults


def decision_faults(decision: object, view: View) -> list[str]:
    """Messages on why `decision` does not fit the envs of `view`; legality is not asked."""
    if not isinstance(decision, Decision):
        return [f"its decision is a {type(decision).__name__}, not a Decision"]
    expected = [
        *((f"action.{name}", decision.action.get(name), (), torch.int64) for name in HEAD_NAMES),
        ("log_probs", decision.log_probs, (len(HEAD_NAMES),), torch.float32),
        ("value", decision.value, (), torch.float32),
    ]
    faults = list[str]()
    for name, part, shape, dtype in expected:
        size = [len(view.noise), *shape]
        device = view.noise.device
        faults += tensor_findings(f"its {name}", part, size, dtype=dtype, device=device)
    return faults


def conduct_findings(
    agent: Agent, view: View, memory: Memory, first: tuple[Decision, Memory]
) -> list[str]:
    """Chance, state outside of its memory, changes of what is given, envs that know one another."""
    given = view.clone()
    kept = copied(memory)
    again = agent.act(given, kept)
    envs = torch.arange(len(view.noise), device=view.noise.device)
    turned = torch.cat((envs[:1], envs[2:], envs[1:2]))
    others, alone = (
        agent.act(view[rows].clone(), tuple(part[rows].clone() for part in memory))
        for rows in (turned, envs[:1])
    )
    changed = (given != view).values(True, True)
    wrong = {
        "for the same view and memory it decides something else the second time: it keeps state "
        "elsewhere than in its memory, or draws other numbers than view.noise": _differ(
            again, first, envs
        ),
        "it changes the view in place": _any(changed),
        "it changes its memory in place": _any([envs < 0, *map(torch.ne, kept, memory)]),
        "what it decides for env 0 depends on other envs": _differ(others, first, envs[:1]),
        "what it decides for env 0 depends on the number of envs": _differ(alone, first, envs[:1]),
    }
    read = torch.stack([*wrong.values()]).tolist()  # a single read by the host
    return [words for words, is_so in zip(wrong, read, strict=True) if is_so]


def copied(memory: Memory) -> Memory:
    """The memory, in a tuple of the same kind."""
    copies = [part.clone() for part in memory]
    return type(memory)(*copies) if hasattr(memory, "_fields") else tuple(copies)


def _any(parts: Iterable[Tensor]) -> Tensor:
    """Whether an element of the bool tensors is True, as a tensor on their device."""
    return torch.cat([part.flatten() for part in parts]).any()


def _differ(
    expected: tuple[Decision, Memory], other: tuple[Decision, Memory], envs: Tensor
) -> Tensor:
    """Whether actions and memories of these envs differ."""
    pairs = [(expected[0].action.get(name), other[0].action.get(name)) for name in HEAD_NAMES]
    pairs += list(zip(expected[1], other[1], strict=True))
    return _any(mine[envs] != its[envs] for mine, its in pairs)
