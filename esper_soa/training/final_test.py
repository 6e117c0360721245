"""Accuracy on the test samples, which nothing in a run sees before the last env-step of a round."""

import torch

from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.nets.seeds.pools import SlotSeeds
from esper_soa.state import STATE_FLOAT
from esper_soa.training.metrics import RoundResult
from esper_soa.vocabulary import RUNNING_STAGES

AT_ONCE = 256  # test samples of a pass, at least


def with_test(world: World, result: RoundResult) -> RoundResult:
    """The result with the test accuracies of its hosts, whose weights `world` still holds."""
    return result._replace(test_accuracies=measure_test(world, result.hosts))


def measure_test(world: World, hosts: HostStates) -> list[float]:
    """Accuracy of N hosts on all test samples, percent, each with all its seeds on.

    hosts: those of all envs of the run as they were last measured. The samples go through in passes
    of as many as a validation pass has, so that an engine which keeps steps has one for both.
    """
    nets = world.rules.nets
    engine = world.rules.engine
    own = (world.reduction.own(part).to(world.device) for part in hosts[:4])
    stage, blueprint, blend, alpha = own
    running = torch.isin(stage, stage.new_tensor(RUNNING_STAGES))
    none = torch.zeros_like(running)
    visible = running & (alpha > 0)
    over = none if world.rules.early_stop.enabled else None
    seeds = SlotSeeds(running, stage, blueprint, blend, none, visible, none, none, none, over)
    active = engine.claim_(nets, world.weights, seeds, world.seed_keys(0))
    num_test = len(world.data.test_labels)
    size = max(world.sizes.val_samples, AT_ONCE)
    order = torch.full((-(-num_test // size) * size,), -1, device=world.device)
    order[:num_test] = torch.arange(num_test, device=world.device)
    correct = torch.zeros(len(stage), dtype=STATE_FLOAT, device=world.device)
    targets = world.data.spec.num_targets
    for part in order.split(size):
        feed = world.data.test(part, world.dtype)
        report = engine.validate(nets, world.weights, alpha, active, feed)
        correct += (report.accuracy[:, 0] / 100 * (part >= 0).sum() * targets).round()
    (everyone,) = world.reduction.gather([100.0 * correct / (num_test * targets)])
    accuracies: list[float] = everyone.tolist()
    return accuracies
