"""Plays one round: an episode of every env under a decision maker, with the rollout that a learner needs.

Given a World and a Player by the trainer; the same function plays the control run. It reads the device only
for the roster of running seeds and, one env-step late, for the progress bar.
"""

from typing import NamedTuple

import torch

from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent, restart
from esper_soa.agent.rollout import Rollout, Row, new_rollout, write_
from esper_soa.env.observation import feature_names
from esper_soa.env.step import Percept, Response, guard_, look, measure_
from esper_soa.env.world import World
from esper_soa.ops.progress import Progress
from esper_soa.ops.tally import RoundResult, Tally, pulse
from esper_soa.state import Decision, View


class Player(NamedTuple):
    """Who decides, and who learns from it (None: nobody)."""

    agent: Agent
    learner: Learner | None


def play_round(
    world: World, player: Player, number: int, progress: Progress, label: str
) -> tuple[RoundResult, Rollout | None]:
    """One episode of every env; the rollout is None where nobody learns."""
    rules, num_envs, device = world.rules, world.sizes.num_envs, world.device
    state = world.start_round(number)
    fresh = memory = player.agent.start(num_envs, device)
    tally, rollout, seen = Tally(device, num_envs), _rollout(world, player), None
    for step in range(rules.max_steps):
        state, measured = measure_(rules, world.weights, state, world.work(step))
        if seen is not None:  # its copy has arrived: measure_ waited for the device
            progress.advance(num_envs, label, *seen.tolist())
        reset = state.guard.panic  # rolled back an env-step ago: a new trajectory begins here
        state, measured = guard_(rules, world.weights, state, measured)
        percept = world.kernels.perceive(rules, state, measured)
        view = View(state=percept.state, observation=percept.observation, masks=percept.masks,
                    noise=world.noise(step), batch_size=[num_envs])  # fmt: skip
        decision, memory = player.agent.act(view, restart(memory, fresh, reset))
        response = world.kernels.respond(rules, percept, decision.action)
        tally.add_(measured, percept, response)
        if rollout is not None and player.learner is not None:
            row = _row(player.learner, percept, decision, response, step + 1 == rules.max_steps)
            write_(rollout, step, row.replace(reset=reset))
        state, seen = response.state, pulse(response.state)
    if rollout is not None:
        masks, observation = look(rules, state)
        after = View(state=state, observation=observation, masks=masks, noise=world.noise(rules.max_steps),
                     batch_size=[num_envs])  # fmt: skip
        memory = restart(memory, fresh, state.guard.panic)
        rollout.bootstrap.copy_(player.agent.act(after, memory)[0].value)
    result = tally.read(state, rules.reward.counts)
    progress.advance(num_envs, label, *(seen.tolist() if seen is not None else (float("nan"), float("nan"))))
    return result, rollout


def _rollout(world: World, player: Player) -> Rollout | None:
    if player.learner is None:
        return None
    names = tuple(spec.name for spec in world.rules.nets.shape.slots)
    return new_rollout(
        world.rules.max_steps, world.sizes.num_envs, len(names), len(feature_names(names)), world.device
    )  # fmt: skip


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
