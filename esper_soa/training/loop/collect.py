"""Collects one round: an episode of every env under a decision maker, with a learner's rollout.

It reads the device only for the progress bar, the recorder and the end of episodes, once the
numbers are there, an env-step late at the earliest; nobody waits for them. On a GPU a round whose
episodes have all ended early therefore ends some idle env-steps later, which count nowhere.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent, decide, restart
from esper_soa.agent.rollout import Rollout, Row, new_rollout, write_
from esper_soa.env.env import NO_OBSERVER, Env, Observer
from esper_soa.env.observation import feature_names
from esper_soa.env.step import EnvView, StepResult
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.nets.model.blueprints import num_codes
from esper_soa.state import Decision, EnvState, select
from esper_soa.training.loop.recorder import NO_RECORDER, Facts, Recorder
from esper_soa.training.results.metrics import (
    PROGRESS_FIGURES,
    MetricsAccumulator,
    PendingCopy,
    RoundResult,
    read_progress,
)
from esper_soa.training.results.progress import Progress


class Player(NamedTuple):
    """The agent of a round, its learner and its teacher."""

    agent: Agent
    learner: Learner | None  # None: nobody
    teacher: Agent | None = None  # its answers are for the learner alone


class Round(NamedTuple):
    """A round to collect: its number, and what shows, times and records it."""

    number: int  # from 0; every random stream of the round follows from it
    progress: Progress
    label: str = ""
    profile: Observer = NO_OBSERVER
    topology: Topology | None = None  # seeds that stand in the hosts from the first env-step on
    recorder: Recorder = NO_RECORDER


class EpisodeRunner:
    """One episode of every env in progress."""

    def __init__(self, world: World, player: Player, request: Round) -> None:
        self.env = Env(world, request.profile)
        self.player = player
        self.progress = request.progress
        self.label = request.label
        self.profile = request.profile
        num_envs = world.setup.num_envs
        self.env.begin_(request.number, request.topology)
        self.fresh = self.memory = player.agent.start(num_envs, world.device)
        teacher = player.teacher
        fresh = () if teacher is None else teacher.start(num_envs, world.device)
        self.fresh_teacher = self.teacher_memory = fresh
        self.metrics = MetricsAccumulator(
            world.rules, num_envs, world.setup.train_samples, kernels=world.kernels
        )
        self.rollout = rollout_of(world, player)
        self.earned: list[Tensor] = []  # raw rewards float64 [N] of every env-step, for the learner
        self.recorder = request.recorder
        self.recorder.begin(request.number + 1)
        self.pending_copy = deque[PendingCopy]()  # numbers of env-steps that are not reported yet
        self.num_playing = num_envs  # envs whose episode goes on behind those that are reported
        self.num_reported = 0  # env-steps
        self.profile.on_phase_end("reset")

    def step_(self) -> None:
        env = self.env
        phase_ended = self.profile.on_phase_end
        step = env.step_number
        observed = env.observe_()
        self._report()
        phase_ended("telemetry")
        ended = observed.ended
        memory = restart(self.memory, self.fresh, observed.restarted)
        agent, _, teacher = self.player
        decision, memory, probabilities = decide(
            agent, observed.view, memory, openly=self.recorder.full
        )
        self.memory = memory if ended is None else restart(memory, self.memory, ended)
        phase_ended("policy")
        result = env.apply_action_(decision.action)
        if self.rollout is not None:
            row = row_of(observed, decision, result, truncated=env.truncated)
            if ended is not None:
                row = select(ended, self.rollout.rows[step], row)
            write_(self.rollout, step, row)
            self.earned.append(result.terms.total)
            if teacher is not None and self.rollout.taught is not None:
                memory = restart(self.teacher_memory, self.fresh_teacher, observed.restarted)
                taught, self.teacher_memory = teacher.act(observed.view, memory)
                self.rollout.taught[step].update_(taught.action)  # type: ignore[arg-type]
        phase_ended("policy")
        self.metrics.add_(observed, result)
        record = self.recorder.pack(Facts(observed, decision, result, probabilities=probabilities))
        self._send(result.state, record)
        phase_ended("telemetry")
        self.profile.env_step()

    def _send(self, state: EnvState, record: Tensor | None) -> None:
        """Start to copy the numbers of an env-step; see how many envs go on, as far as is known."""
        ended = self.env.world.rules.ended(state)
        self.pending_copy.append(read_progress(state, record, ended))
        if ended is not None:
            behind = map(self._count_playing, self.pending_copy)
            self.env.num_playing = min(self.num_playing, *behind)

    def _count_playing(self, copy: PendingCopy) -> int:
        """Envs whose episode goes on behind an env-step; all where its numbers are not here yet."""
        num_ended = int(copy.numbers.numpy()[len(PROGRESS_FIGURES)]) if copy.here else 0
        return self.env.num_envs - num_ended

    def _report(self) -> None:
        num_envs = self.env.num_envs
        stops_early = self.env.world.rules.early_stop.enabled
        figures = len(PROGRESS_FIGURES)
        all_envs = self.env.world.reduction.all_envs(num_envs)
        while self.pending_copy and self.pending_copy[0].here:
            copy = self.pending_copy.popleft()
            numbers = copy.numbers.numpy()
            recorded = numbers[figures + stops_early :]
            if recorded.size:
                self.recorder.emit(self.num_reported + 1, recorded.reshape(num_envs, -1))
            # envs of other processes count as if as many of them went on as of those here
            playing = all_envs * self.num_playing // num_envs
            self.num_reported += 1
            self.progress.skip_env_steps(all_envs - playing)
            if playing:  # nobody plays in what the host has begun before it knew
                self.progress.advance(playing, self.label, *numbers[:figures].tolist())
            if stops_early:
                self.num_playing = self._count_playing(copy)

    def finish(self) -> tuple[RoundResult, Rollout | None]:
        """Return the results of the round; the rollout is None where no policy learns."""
        env = self.env
        world = env.world
        state = env.state
        steps_left = world.rules.max_steps - env.step_number
        if steps_left:  # every episode has ended early
            self.progress.skip_env_steps(steps_left * world.reduction.all_envs(env.num_envs))
            self.metrics.skip_env_steps(steps_left * env.num_envs)
            # for rows that stay empty
            self.earned += [torch.zeros_like(rewards) for rewards in self.earned[-1:]] * steps_left
        if self.rollout is not None and self.player.learner is not None:
            self.player.learner.fill_rewards_(self.rollout, torch.stack(self.earned))
            self.rollout.rows.truncated.logical_and_(~env.terminated)
            view = env.current_view()
            self.rollout.bootstrap.copy_(self.player.agent.act(view, self.memory)[0].value)
        self.profile.on_phase_end("policy")
        result = self.metrics.read(state, world.reduction, world.settings)
        self.pending_copy[-1].wait()
        self._report()
        self.recorder.end()
        self.profile.on_phase_end("telemetry")
        return result, self.rollout


def play_round(world: World, player: Player, request: Round) -> tuple[RoundResult, Rollout | None]:
    """One episode of every env, see EpisodeRunner; the rollout is None where no policy learns."""
    episode = EpisodeRunner(world, player, request)
    while not episode.env.over:
        episode.step_()
    return episode.finish()


def rollout_of(world: World, player: Player) -> Rollout | None:
    if player.learner is None:
        return None
    shape = world.setup.shape
    names = tuple(spec.name for spec in shape.slots)
    rollout = new_rollout(
        world.rules.max_steps,
        world.setup.num_envs,
        len(names),
        num_features=len(feature_names(names, world.rules.observed)),
        device=world.device,
        num_blueprints=num_codes(shape.blueprints),
    )
    taught = None if player.teacher is None else rollout.rows.action.clone()
    return rollout._replace(taught=taught)


def row_of(observed: EnvView, decision: Decision, result: StepResult, truncated: Tensor) -> Row:
    """The row of one env-step that the learner keeps.

    truncated: bool [N], episodes that end here; `finish` takes out those that terminate.
    """
    view = observed.view
    attribution = observed.attribution
    panic = view.state.guard.panic  # a rollback ends the trajectory
    valid = result.terms.total.isfinite()
    return Row(
        features=view.observation.features,
        blueprints=view.observation.blueprints,
        masks=view.masks,
        action=decision.action,
        effective_op=result.outcome.effective_op,
        log_probs=decision.log_probs,
        value=decision.value,
        reward=torch.zeros_like(decision.value),  # filled in once the episode is over
        terminal=panic,
        truncated=truncated & ~panic,
        reset=observed.restarted,
        valid=valid,
        contribution=attribution.contribution.float(),
        contribution_measured=attribution.measured,
        batch_size=[valid.shape[0]],
    )
