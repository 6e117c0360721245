"""The decision maker of a run, and the learned policy that it begins with."""

from collections.abc import Sequence

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.agent.protocol import Agent
from esper_soa.config.agent import SCRATCH, PolicyConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.nets.setup import Setup, choose_workers
from esper_soa.runtime.compilation import GRADIENTS, POLICY
from esper_soa.training.files.policies import load_policy, load_pretrained
from esper_soa.training.loop.build import rule_player
from esper_soa.training.loop.collect import Player


def build_players(
    cfgs: Sequence[TrainConfig], worlds: Sequence[World], resumed: bool = False
) -> list[Player]:
    """Decision makers of several worlds, with one learner at most; else as build_player."""
    players = [build_player(cfgs[0], worlds[0], resumed)]
    learner = players[0].learner
    for cfg, world in zip(cfgs[1:], worlds[1:], strict=True):
        if learner is None:
            players.append(build_player(cfg, world))
            continue
        policy = learner.policy.for_slots(world.setup.shape.slots)
        policy.steps = world.kernels.replay.steps(POLICY, world.device)
        learner.policies.append(policy)
        players.append(Player(policy, learner, _teacher(cfg.policy, world.setup, cfg.seed)))
    return players


def _teacher(policy: PolicyConfig, setup: Setup, seed: int) -> Agent | None:
    if not policy.imitation.rounds:
        return None
    setting = "policy.imitation.teacher"
    return rule_player(policy.imitation.teacher, setting, policy, setup=setup, seed=seed)


def build_player(cfg: TrainConfig, world: World, resumed: bool = False) -> Player:
    """The decision maker that `policy.name` asks for, with what `policy.init` has learned unless it
    is `resumed`, as its state comes from a checkpoint then. Raises UserError where it does not fit.
    """
    if cfg.policy.name != "ppo":
        name = cfg.policy.name
        agent = rule_player(name, "policy.name", cfg.policy, setup=world.setup, seed=cfg.seed)
        return Player(agent, None)
    shape = world.setup.shape
    names = names_by_code(shape.blueprints)
    policy = RecurrentPolicy(cfg.policy, shape.slots, cfg.seed, num_blueprints=len(names))
    policy.to(world.device)
    replay = world.kernels.replay
    policy.steps = replay.steps(POLICY, world.device)
    learner = Learner(
        policy,
        cfg.policy.ppo,
        total_updates=cfg.policy.ppo.floor_penalty_rounds,
        seed=cfg.seed,
        steps=replay.steps(GRADIENTS, world.device),
        imitation=cfg.policy.imitation,
        reduction=world.reduction,
    )
    learner.workers = choose_workers(world.setup.compute.workers, cfg.envs, world.device)
    if cfg.policy.init != SCRATCH and not resumed:
        learned = load_policy(cfg.policy.init, world.device)
        load_pretrained(
            learner, cfg.policy.network, learned, observe=cfg.policy.observe, blueprints=names
        )
    return Player(policy, learner, _teacher(cfg.policy, world.setup, cfg.seed))
