"""The decision maker of a run, and the learned policy that it begins with."""

from collections.abc import Sequence

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent
from esper_soa.config.agent import SCRATCH, PolicyConfig
from esper_soa.env.world import World
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.nets.setup import Setup, choose_workers
from esper_soa.runtime.compilation import GRADIENTS, POLICY
from esper_soa.system.transfers import move_module_
from esper_soa.training.files.policies import load_policy, load_pretrained
from esper_soa.training.loop.build import rule_player
from esper_soa.training.loop.collect import Player


def build_players(
    policy: PolicyConfig, worlds: Sequence[World], resumed: bool = False
) -> list[Player]:
    """Decision makers of several worlds, with one learner at most; else as build_player."""
    players = [build_player(policy, worlds[0], resumed)]
    learner = players[0].learner
    for world in worlds[1:]:
        if learner is None:
            players.append(build_player(policy, world))
            continue
        network = learner.policy.for_slots(world.setup.shape.slots)
        network.steps = world.kernels.replay.steps(POLICY, world.device)
        learner.policies.append(network)
        players.append(Player(network, learner, _teacher(policy, world.setup)))
    return players


def _teacher(policy: PolicyConfig, setup: Setup) -> Agent | None:
    if not policy.imitation.rounds:
        return None
    setting = "policy.imitation.teacher"
    return rule_player(policy.imitation.teacher, setting, policy, setup=setup)


def build_player(policy: PolicyConfig, world: World, resumed: bool = False) -> Player:
    """The decision maker that `policy.name` asks for, with what `policy.init` has learned unless it
    is `resumed`, as its state comes from a checkpoint then. Raises UserError where it does not fit.
    """
    if policy.name != "ppo":
        name = policy.name
        agent = rule_player(name, "policy.name", policy, setup=world.setup)
        return Player(agent, None)
    shape = world.setup.shape
    names = names_by_code(shape.blueprints)
    network = RecurrentPolicy(policy, shape.slots, world.setup.seed, num_blueprints=len(names))
    move_module_(network, world.device)
    replay = world.kernels.replay
    network.steps = replay.steps(POLICY, world.device)
    learner = Learner(
        network,
        policy.ppo,
        total_updates=policy.ppo.floor_penalty_rounds,
        seed=world.setup.seed,
        steps=replay.steps(GRADIENTS, world.device),
        imitation=policy.imitation,
        reduction=world.reduction,
    )
    setup = world.setup
    num_envs = world.reduction.all_envs(setup.num_envs)
    learner.workers = choose_workers(setup.compute.workers, num_envs, world.device)
    if policy.init != SCRATCH and not resumed:
        learned = load_policy(policy.init, world.device)
        load_pretrained(learner, policy.network, learned, observe=policy.observe, blueprints=names)
    return Player(network, learner, _teacher(policy, world.setup))
