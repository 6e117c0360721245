"""Accuracy and loss on the test samples, which nothing in a run sees before the last env-step of a
round.
"""

import torch
from torch import Tensor

from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.nets.seeds.pools import SlotSeeds
from esper_soa.state import STATE_FLOAT, stage_in
from esper_soa.system.transfers import move
from esper_soa.training.results.metrics import RoundResult
from esper_soa.vocabulary import RUNNING_STAGES

AT_ONCE = 256  # test samples of a pass, at least


def with_test(world: World, result: RoundResult) -> RoundResult:
    """The result with the test scores of its hosts, whose weights `world` still holds."""
    accuracies, losses, answers = measure_test(world, result.hosts)
    return result._replace(test_accuracies=accuracies, test_losses=losses, answers=answers)


def measure_test(
    world: World, hosts: HostStates, over: Tensor | None = None
) -> tuple[list[float], list[float], Tensor]:
    """Accuracies (percent) and losses (nats, mean over the targets) of N hosts with all seeds on,
    and the right targets of each of J test samples [N, J], -1 where a host has other samples: int8
    where that holds them, else int16.

    hosts: those of all envs of the run as last measured. over: bool [N, S], hosts to leave out,
    where episodes may end early; their scores mean nothing. The samples go through in passes
    of as many as a validation pass has, so that an engine which keeps steps has one for both.
    """
    setup = world.setup
    engine = world.rules.engine
    here = [world.reduction.rows_here(part) for part in hosts[:4]]
    stage, blueprint, blend, alpha = move(here, world.device)
    running = stage_in(stage, RUNNING_STAGES)
    none = torch.zeros_like(running)
    visible = running & (alpha > 0)
    over = none if over is None and world.rules.early_stop.enabled else over
    seeds = SlotSeeds(running, stage, blueprint, blend, none, visible, none, none, none, over)
    active = engine.claim_(setup, world.weights, seeds, keys=world.seed_keys(0))
    parts = [(len(entry.source.test_labels), entry.test) for _, entry in world.sets]
    size = max(world.setup.val_samples, AT_ONCE)
    places = torch.arange(-(-max(parts)[0] // size) * size, device=world.device)
    # accuracy of all envs, or of each
    order = world.join([torch.where(places < count, places + first, -1) for count, first in parts])
    correct = torch.zeros(len(stage), dtype=STATE_FLOAT, device=world.device)
    loss = torch.zeros_like(correct)
    targets = world.data.spec.num_targets
    samples = len(world.data.test_labels)
    answers = torch.full((len(stage), samples + 1), -1, dtype=torch.int16, device=world.device)
    for part in order.split(size, dim=-1):
        feed = world.data.test(part, world.dtype)
        found = answers.new_zeros(len(stage), part.shape[-1])
        report = engine.validate(setup, world.weights, alpha, active, feed, answers=found)
        # those of no sample go to the last column
        answers.scatter_(1, torch.where(part < 0, samples, part).expand_as(found), found)
        count = (part >= 0).sum(-1) * targets
        right = (report.accuracy[:, 0] / 100 * count).round()
        # nothing is known of hosts that have no samples in this pass
        correct += torch.where(count > 0, right, 0.0)
        loss += torch.where(count > 0, report.loss * count, 0.0)
    total = (order >= 0).sum(-1) * targets
    answers = answers[:, :-1].to(torch.int8 if targets < 2**7 else torch.int16)
    scores = 100.0 * correct / total, loss / total, answers
    accuracies, losses, answers = world.reduction.gather(scores)
    return accuracies.tolist(), losses.tolist(), answers.cpu()
