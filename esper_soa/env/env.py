"""N envs as a user calls them: `reset`, then `step` with an action for each, time after time.

    seen = env.reset()
    while seen is not None:
        result, seen = env.step(choose(seen.view))

What comes before a decision is `observe_`, what follows it `apply_action_`.
"""

from typing import NamedTuple

from torch import Tensor

from esper_soa.env.step import Observed, StepResult, Work, initial_state, look, measure_
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.state import Action, EnvState, Masks, Measurements, Observation, View


class Observer:
    """Who is told what an env does: nobody; see training/profile.py for others."""

    def phase_ended(self, phase: str) -> None:
        """What passed since the phase before was `phase`."""

    def watch(self, work: Work) -> Work:
        """The work of an env-step, as it is or with feeds that are timed."""
        return work


NOBODY = Observer()


class Seen(NamedTuple):
    """What an env-step showed of N envs before anybody decided anything."""

    view: View  # what a policy is given
    observed: Observed
    measured: Measurements
    restarted: Tensor  # bool [N]: rolled back an env-step ago, so a new trajectory begins here


class Env:
    """N envs in one episode after the other.

    Every random number of a round follows from the world's seed, the round, the env and env-step.
    """

    def __init__(self, world: World, observer: Observer = NOBODY) -> None:
        """observer: is told of the phases that end."""
        self.world = world
        self.observer = observer
        self.step_number = 0  # of the env-step in progress, from 0
        self.playing = world.sizes.num_envs  # how many episodes have not ended early
        self.state: EnvState = initial_state(world.rules, world.sizes.num_envs, world.device)
        self.observed: Observed | None = None  # that has not been responded to

    @property
    def num_envs(self) -> int:
        """N."""
        return self.world.sizes.num_envs

    @property
    def over(self) -> bool:
        """Whether the episode has had all its env-steps, or has ended early in every env."""
        return self.playing == 0 or self.step_number == self.world.rules.max_steps

    def reset(self, number: int = 0, topology: Topology | None = None) -> Seen:
        """Begin round `number` with fresh hosts, and play its first env-step up to the decision.

        topology: seeds that stand in the hosts from the first env-step on.
        """
        self.begin_(number, topology)
        return self.observe_()

    def step(self, action: Action) -> tuple[StepResult, Seen | None]:
        """What becomes of the action [N] and what the next env-step shows; None after the last."""
        result = self.apply_action_(action)
        return result, None if self.over else self.observe_()

    def begin_(self, number: int, topology: Topology | None = None) -> None:
        """Fresh hosts and an empty state, or one with `topology` in it."""
        self.state = self.world.start_round(number, topology)
        self.step_number = 0
        self.observed = None
        self.playing = self.num_envs
        self.observer.phase_ended("reset")

    def observe_(self) -> Seen:
        """Train and validate every network, guard, attribute, record, observe."""
        world = self.world
        rules = self.world.rules
        observer = self.observer
        work = observer.watch(world.work(self.step_number))
        observer.phase_ended("data")
        state, measured = measure_(rules, world.weights, self.state, work, observer.phase_ended)
        restarted = state.guard.panic
        measured, self.observed = world.kernels.perceive_(rules, world.weights, state, measured)
        observer.phase_ended("state")
        view = self._view(self.observed.state, self.observed.masks, self.observed.observation)
        return Seen(view, self.observed, measured, restarted)

    def apply_action_(self, action: Action) -> StepResult:
        """Pay for the actions [N], carry them out, let time pass. RuntimeError before `observe_`.

        Where episodes may end early the host waits to know how many go on, so that nothing is
        played for none.
        """
        if self.observed is None:
            unseen = "nothing has been observed since the last action"
            raise RuntimeError(f"{unseen}: call reset, or observe_, first")
        result = self.world.kernels.respond(self.world.rules, self.observed, action)
        self.state = result.state
        self.observed = None
        self.step_number += 1
        if self.world.rules.early_stop.enabled:
            self.playing = self.num_envs - int(self.state.ending.over.sum())
        self.observer.phase_ended("state")
        return result

    def after(self) -> View:
        """What a policy would be given now, unmeasured: for the value of what lies behind."""
        masks, observation = look(self.world.rules, self.state)
        return self._view(self.state, masks, observation)

    def _view(self, state: EnvState, masks: Masks, observation: Observation) -> View:
        noise = self.world.noise(self.step_number)
        return View(state, observation, masks, noise, batch_size=[self.num_envs])
