"""N envs with `reset` and `step`.

    observed = env.reset()
    while observed is not None:
        result, observed = env.step(choose(observed.view))

`observe_` is the part before a decision, `apply_action_` the part after it.
"""

from copy import copy

import torch
from torch import Tensor

from esper_soa.config.env import REWARD_MODE
from esper_soa.env.early_stop import Cause
from esper_soa.env.step import EnvView, StepData, StepResult, initial_state, look, measure_
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.nets.seeds.snapshot import copy_envs_
from esper_soa.state import Action, EnvState, Masks, Observation, View, select


class Observer:
    """Told of phases of env-steps, rounds and runs (results/profile.py); this one does nothing."""

    def on_phase_end(self, phase: str) -> None:
        """Called at the end of `phase`."""

    def watch(self, data: StepData) -> StepData:
        """The data of an env-step, as they are or with feeds that are timed."""
        return data

    def env_step(self) -> None:
        """An env-step ends here."""

    def report(self, label: str) -> None:
        """An update ends here; say what is known."""

    def close(self) -> None:
        """The run ends here."""


NO_OBSERVER = Observer()


class Env:
    """N envs that play episodes in sequence.

    Every random number of a round follows from the world's seed, the round, the env and env-step.
    """

    def __init__(self, world: World, observer: Observer = NO_OBSERVER) -> None:
        """observer: called at the end of each phase."""
        self.world = world
        self.observer = observer
        self.step_number = 0  # of the env-step in progress, from 0
        self.num_playing = world.setup.num_envs  # envs whose episode has not ended early
        self.state: EnvState = initial_state(world.rules, world.setup.num_envs, world.device)
        self.observed: EnvView | None = None  # what the next action answers

    @property
    def num_envs(self) -> int:
        """N."""
        return self.world.setup.num_envs

    @property
    def over(self) -> bool:
        """Whether the episode has had all its env-steps, or has ended early in every env."""
        return self.num_playing == 0 or self.step_number == self.world.rules.max_steps

    @property
    def truncated(self) -> Tensor:
        """bool [N]: envs whose episode has ended, early or with its last env-step."""
        return self.state.ending.over | self.over

    @property
    def terminated(self) -> Tensor:
        """bool [N]: envs whose planned end nothing follows, by RewardConfig.episode_end."""
        ending = self.state.ending
        planned = ~ending.over | (ending.cause == Cause.LENGTH)
        world = self.world
        ends_terminate = world.rules.reward.ends_terminate(world.values.get(REWARD_MODE))
        return self.truncated & planned & ends_terminate

    def reset(self, number: int = 0, topology: Topology | None = None) -> EnvView:
        """Begin round `number` with fresh hosts, and play its first env-step up to the decision.

        topology: seeds that stand in the hosts from the first env-step on.
        """
        self.begin_(number, topology)
        return self.observe_()

    def step(self, action: Action) -> tuple[StepResult, EnvView | None]:
        """Result of the action [N], and the next observation; None after the last env-step.

        Where episodes may end early the host waits for the device, to play no env-step in vain:
        whether this was the last action decides if another is played before the call ends.
        """
        result = self.apply_action_(action)
        ended = self.world.rules.ended(self.state)
        if ended is not None:
            self.num_playing = self.num_envs - int(ended.sum())
        return result, None if self.over else self.observe_()

    def begin_(self, number: int, topology: Topology | None = None) -> None:
        """Fresh hosts and an empty state, or one with `topology` in it."""
        self.state = self.world.start_round(number, topology)
        self.step_number = 0
        self.observed = None
        self.num_playing = self.num_envs
        self.observer.on_phase_end("reset")

    def observe_(self) -> EnvView:
        """Train and validate every network, guard, attribute, record, observe."""
        world = self.world
        world.take_compiled(self.step_number)
        rules = world.rules
        observer = self.observer
        data = observer.watch(world.work(self.step_number))
        observer.on_phase_end("data")
        state, measured = measure_(
            rules, world.weights, self.state, data=data, on_phase_end=observer.on_phase_end
        )
        restarted = state.guard.panic
        measured, recorded = world.kernels.guard_and_observe_(
            rules, world.weights, state, measured=measured, values=world.kernel_values
        )
        observer.on_phase_end("state")
        state, attribution, masks, observation = recorded
        view = self._view(state, masks, observation)
        self.observed = EnvView(
            view, attribution, measured, restarted=restarted, ended=rules.ended(state)
        )
        return self.observed

    def apply_action_(self, action: Action) -> StepResult:
        """Pay for the actions [N], carry them out, let time pass. RuntimeError before `observe_`.

        Nothing is read of the device: where episodes may end early the caller says how many go on,
        in `num_playing`, as soon as it knows; an env whose episode is over only waits.
        """
        if self.observed is None:
            remedy = "call reset, or observe_, first"
            raise RuntimeError(f"nothing has been observed since the last action: {remedy}")
        world = self.world
        result = world.kernels.respond(
            world.rules, self.observed, action, values=world.kernel_values
        )
        self.state = result.state
        self.observed = None
        self.step_number += 1
        self.observer.on_phase_end("state")
        return result

    def copy_envs_(self, source: Tensor, same_draws: bool = True) -> None:
        """Make every env i a copy of env source[i] (int64 [N]) as it stands, observed or not.

        same_draws: the copy has its source's data order and draws to the end of the round, so that
        equal actions keep both equal to the bit; without, it has those of its row. On the device,
        without a read by the host, except where episodes may end early or settings differ by env.
        Raises SettingError for data that cannot be shared, see `World.copy_envs_`.
        """
        self.world.copy_envs_(source, same_draws)
        self.state = self.state[source]
        ended = self.world.rules.ended(self.state)
        if ended is not None:
            self.num_playing = self.num_envs - int(ended.sum())
        observed = self.observed
        if observed is None:
            return
        view = observed.view[source].replace(noise=self.world.noise(self.step_number))
        self.observed = EnvView(
            view,
            observed.attribution[source],
            observed.measured[source],
            restarted=observed.restarted[source],
            ended=ended,
        )

    def take_envs_(self, origin: World, seen: EnvView, source: Tensor, where: Tensor) -> None:
        """Make the envs `where` (bool [N]) copies of the envs source[i] (int64 [N]) of `origin`, as
        they were `seen` there before the actions of this env-step; the world follows them all.
        """
        self.world.follow_(origin, source)
        copy_envs_(self.world.weights, origin.weights, source, where=where)
        given = EnvView._make(None if part is None else part[source] for part in seen)
        kept = self.observed or given._replace(view=given.view.replace(state=self.state))
        view = select(where, given.view, kept.view)
        self.observed = EnvView(
            view,
            select(where, given.attribution, kept.attribution),
            select(where, given.measured, kept.measured),
            restarted=torch.where(where, given.restarted, kept.restarted),
            ended=self.world.rules.ended(view.state),
        )

    def copy(self) -> "Env":
        """Envs that stand where these do, in a world of their own."""
        twin = copy(self)
        twin.world = self.world.copy()
        twin.state = self.state.clone()
        if self.observed is not None:
            parts = (None if part is None else part.clone() for part in self.observed)
            twin.observed = EnvView._make(parts)
        return twin

    def current_view(self) -> View:
        """The current View without new measurements, for bootstrap values."""
        masks, observation = look(self.world.rules, self.state, self.world.kernel_values)
        return self._view(self.state, masks, observation)

    def _view(self, state: EnvState, masks: Masks, observation: Observation) -> View:
        noise = self.world.noise(self.step_number)
        return View(state, observation, masks, noise=noise, batch_size=[self.num_envs])
