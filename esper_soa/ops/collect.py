"""Plays one round: an episode of every env under a decision maker, with the rollout that a learner needs.

Given a World and a Player by the trainer; the same function plays its controls. It reads the device only
for the roster of running seeds and, one env-step late, for the progress bar.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent, restart
from esper_soa.agent.rollout import Rollout, Row, new_rollout, with_teacher, write_
from esper_soa.env.observation import feature_names
from esper_soa.env.step import Percept, Response, guard_, look, measure_
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.ops.profile import NO_PROFILE, NoProfile
from esper_soa.ops.progress import Progress
from esper_soa.ops.tally import RoundResult, Tally, pulse
from esper_soa.state import Decision, View


class Player(NamedTuple):
    """Who decides, who learns from it (None: nobody), and who is asked what it would have done (None: nobody)."""

    agent: Agent
    learner: Learner | None
    teacher: Agent | None = None  # its answers are for the learner alone


class Round(NamedTuple):
    """Which round is played, as what it is shown, and who times it."""

    number: int  # from 0; every random stream of the round follows from it
    progress: Progress
    label: str = ""
    profile: NoProfile = NO_PROFILE
    topology: Topology | None = None  # seeds that stand in the hosts from the first env-step on


class Episode:
    """One episode of every env in progress."""

    def __init__(self, world: World, player: Player, played: Round) -> None:
        """Fresh hosts of the round."""
        self.world, self.player = world, player
        self.progress, self.label, self.profile = played.progress, played.label, played.profile
        num_envs = world.sizes.num_envs
        self.state = world.start_round(played.number, played.topology)
        self.fresh = self.memory = player.agent.start(num_envs, world.device)
        teacher = player.teacher
        self.fresh_teacher = self.teacher_memory = teacher.start(num_envs, world.device) if teacher is not None else ()
        self.tally = Tally(world.device, num_envs, world.flop, world.sizes.train_samples)
        self.rollout = _rollout(world, player)
        self.seen: Tensor | None = None  # of the env-step before, on its way to the host
        self.profile.lap("reset")

    def step_(self, step: int) -> None:
        """Play env-step `step` (from 0)."""
        world, rules, lap, num_envs = self.world, self.world.rules, self.profile.lap, self.world.sizes.num_envs
        work = self.profile.watch(world.work(step))
        lap("data")
        state, measured = measure_(rules, world.weights, self.state, work, lap)
        if self.seen is not None:  # its copy has arrived: measure_ waited for the device
            self.progress.advance(num_envs, self.label, *self.seen.tolist())
        lap("telemetry")
        reset = state.guard.panic  # rolled back an env-step ago: a new trajectory begins here
        state, measured = guard_(rules, world.weights, state, measured)
        percept = world.kernels.perceive(rules, state, measured)
        lap("ledger")
        view = View(state=percept.state, observation=percept.observation, masks=percept.masks,
                    noise=world.noise(step), batch_size=[num_envs])  # fmt: skip
        decision, self.memory = self.player.agent.act(view, restart(self.memory, self.fresh, reset))
        lap("policy")
        response = world.kernels.respond(rules, percept, decision.action)
        lap("ledger")
        if self.rollout is not None and self.player.learner is not None:
            row = _row(self.player.learner, percept, decision, response, step + 1 == rules.max_steps)
            write_(self.rollout, step, row.replace(reset=reset))
            self._ask_(view, reset, step)
        lap("policy")
        self.tally.add_(measured, percept, response)
        self.state, self.seen = response.state, pulse(response.state)
        lap("telemetry")
        self.profile.env_step()

    def _ask_(self, view: View, reset: Tensor, step: int) -> None:
        """Record what the teacher would do at `step`, given what it is shown and remembers; it changes nothing."""
        teacher, rollout = self.player.teacher, self.rollout
        if teacher is not None and rollout is not None and rollout.taught is not None:
            memory = restart(self.teacher_memory, self.fresh_teacher, reset)
            decision, self.teacher_memory = teacher.act(view, memory)
            rollout.taught[step].update_(decision.action)  # type: ignore[arg-type]

    def finish(self) -> tuple[RoundResult, Rollout | None]:
        """After the last env-step: what the round came to; the rollout is None where nobody learns."""
        world, player, state = self.world, self.player, self.state
        num_envs = world.sizes.num_envs
        if self.rollout is not None:
            masks, observation = look(world.rules, state)
            after = View(state=state, observation=observation, masks=masks, noise=world.noise(world.rules.max_steps),
                         batch_size=[num_envs])  # fmt: skip
            memory = restart(self.memory, self.fresh, state.guard.panic)
            self.rollout.bootstrap.copy_(player.agent.act(after, memory)[0].value)
        self.profile.lap("policy")
        result = self.tally.read(state, world.rules.reward.counts)
        seen = self.seen.tolist() if self.seen is not None else (float("nan"), float("nan"))
        self.progress.advance(num_envs, self.label, *seen)
        self.profile.lap("telemetry")
        return result, self.rollout


def play_round(world: World, player: Player, played: Round) -> tuple[RoundResult, Rollout | None]:
    """One episode of every env, see Episode; the rollout is None where nobody learns."""
    episode = Episode(world, player, played)
    for step in range(world.rules.max_steps):
        episode.step_(step)
    return episode.finish()


def _rollout(world: World, player: Player) -> Rollout | None:
    if player.learner is None:
        return None
    names = tuple(spec.name for spec in world.rules.nets.shape.slots)
    rollout = new_rollout(
        world.rules.max_steps, world.sizes.num_envs, len(names), len(feature_names(names)), world.device
    )  # fmt: skip
    return with_teacher(rollout) if player.teacher is not None else rollout


def _row(learner: Learner, percept: Percept, decision: Decision, response: Response, last: bool) -> Row:
    """What the learner needs to remember of one env-step; the episode is cut, not ended, at its last one.

    A rollback ends the trajectory. Its penalty is a reward as it stands, no sample of what rewards are like.
    """
    attribution, panic, earned = percept.attribution, percept.state.guard.panic, response.terms.total
    no, limit = torch.zeros_like(panic), learner.config.reward_clip
    valid = earned.isfinite()
    scaled = learner.scale_rewards_(earned, valid & ~panic)
    return Row(
        features=percept.observation.features,
        blueprints=percept.observation.blueprints,
        masks=percept.masks,
        action=decision.action,
        effective_op=response.outcome.effective_op,
        log_probs=decision.log_probs,
        value=decision.value,
        reward=torch.where(panic, earned.clamp(-limit, limit).float(), scaled),
        terminal=panic,
        truncated=~panic if last else no,
        reset=no,
        valid=valid,
        contribution=attribution.contribution.float(),
        contribution_measured=attribution.measured,
        batch_size=[valid.shape[0]],
    )
