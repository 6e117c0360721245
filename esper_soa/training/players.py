"""The decision maker of a run, with what it has learned before."""

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.config.agent import SCRATCH
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.graphs import GRADIENTS, POLICY
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.training.build import rule_player
from esper_soa.training.collect import Player
from esper_soa.training.pretrained import load_policy, take_over


def build_player(cfg: TrainConfig, world: World) -> Player:
    """The decision maker that `policy.name` asks for, with what `policy.init` has learned.

    Raises UserError where that does not fit.
    """
    if cfg.policy.name != "ppo":
        return Player(rule_player(cfg, cfg.policy.name, "policy.name"), None)
    shape = world.rules.nets.shape
    names = names_by_code(shape.blueprints)
    policy = RecurrentPolicy(cfg.policy, shape.slots, cfg.seed, len(names)).to(world.device)
    imitation = cfg.policy.imitation
    replay = world.kernels.replay
    policy.steps, gradients = (replay.steps(part, world.device) for part in (POLICY, GRADIENTS))
    ppo = cfg.policy.ppo
    learner = Learner(
        policy, ppo, ppo.floor_penalty_rounds, cfg.seed, gradients, imitation, world.reduction
    )
    if cfg.policy.init != SCRATCH:
        take_over(learner, cfg.policy.network, load_policy(cfg.policy.init, world.device), names)
    teacher = None
    if imitation.rounds:
        teacher = rule_player(cfg, imitation.teacher, "policy.imitation.teacher")
    return Player(policy, learner, teacher)
