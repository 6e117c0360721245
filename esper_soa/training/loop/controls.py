"""Controls for grown hosts: other policies, and networks that do not grow.

A control plays a round again on the same seeds, data order, augmentation and validation images, so
with as many training images where no episode ends early; every random stream is keyed by seed,
round, env and env-step, and by nothing that a policy or a size changes.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import closing
from typing import TypeAlias

from esper_soa.agent.scripted import WaitPolicy
from esper_soa.config.nets import TaskConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.parameters import flop_per_image
from esper_soa.env.step import initial_state
from esper_soa.env.topology import Topology, state_with_topology
from esper_soa.env.world import World
from esper_soa.nets.model.host import IMAGE_SHAPE, host_shape
from esper_soa.nets.model.segments import FeatureShape
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.recorder import Recorder, no_recorder
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.totals import FinalHosts

# Final state of the hosts that a control is compared with.
GrownHosts: TypeAlias = RoundResult | FinalHosts


def play_control(
    name: str,
    cfg: TrainConfig,
    world: World,
    grown: GrownHosts,
    request: Round,
    ranks: Ranks = SINGLE_PROCESS,
    record: Callable[[World], Recorder] = no_recorder,
) -> RoundResult:
    """Play the round of `world`, of `cfg`, as the control `name`: of CONTROLS, or `module:name`;
    its hosts are measured on the test images at the end.

    cfg.control_budget: how long a host trains. At flop, its training FLOP are those of the grown
    host of its env to within half an env-step, or one env-step where that is more.

    wait, random, heuristic and schedule are the scripted policies, with the settings under
    cfg.policy. static_final is what each host of `grown` ended with, trained from the first
    env-step on. static_large is the plain host, `widened` to the mean size of the hosts of `grown`;
    its result is of one slot, which stays empty. record: makes what records the hosts of a world.
    """
    player = Player(WaitPolicy(), None)
    if name == "static_final":
        request = request._replace(topology=grown.topology)
    elif name == "static_large":
        size = sum(grown.parameters) / len(grown.parameters)
        first = world.setup.shape.slots[0].name
        inputs = world.setup.shape.input_shape
        wide = cfg.without_growth(widen_host(world.setup.task, size, inputs), first)
        world = build_world(wide, world.device, world.seed, data=world.data, ranks=ranks)
    else:
        player = Player(rule_player(name, "control", cfg.policy, setup=world.setup), None)
    if cfg.control_budget != "steps":
        all_envs = world.reduction.all_envs(world.setup.num_envs)
        lengths = lengths_at_budget(cfg.control_budget, world, grown, topology=request.topology)
        # the bar expects as many env-steps as the grown hosts may have
        request.progress.skip_env_steps(all_envs * (cfg.steps - max(lengths)))
        world = world.lasting(lengths)
    with closing(record(world)) as recorder:
        result, _ = play_round(world, player, request._replace(recorder=recorder))
    return with_test(world, result)


def lengths_at_budget(
    budget: str, world: World, grown: GrownHosts, topology: Topology | None
) -> list[int]:
    """Env-steps of every env in which hosts of `world`, with the seeds of `topology`, train on as
    many images (budget images) or at as many FLOP (flop) as those of `grown`.
    """
    if budget == "images":
        return grown.num_steps or [world.rules.max_steps] * len(grown.parameters)
    state = initial_state(world.rules, len(grown.parameters), world.device)
    if topology is not None:
        state = state_with_topology(state, topology)
    step_flop = world.setup.train_samples * flop_per_image(state.slots, world.flop)
    pairs = zip(grown.train_flop, step_flop.tolist(), strict=True)
    return [max(1, round(spent / flop)) for spent, flop in pairs]


def widen_host(
    task: TaskConfig, parameters: float, inputs: FeatureShape = IMAGE_SHAPE
) -> TaskConfig:
    """`task` with a width, from its own to the most that a host may have, such that its plain host,
    for images of the shape `inputs`, has most nearly so many parameters; of two as near, the
    narrower.
    """

    def size(width: int) -> int:
        return host_shape(task.with_width(width), (), inputs=inputs).parameters.total

    widths = task.widths
    at = min(bisect_left(widths, parameters, key=size), len(widths) - 1)
    near = widths[max(at - 1, 0) : at + 1]
    return task.with_width(min(near, key=lambda width: abs(size(width) - parameters)))
