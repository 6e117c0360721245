"""Hosts of a world as they were last measured, taken out as plain networks, and their scores."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper_soa.config.settings import TrainConfig
from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost, SlotContents, grown_hosts
from esper_soa.nets.data.batches import BatchSource, origin
from esper_soa.nets.data.image_set import source_of
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.versions import package_versions

AT_ONCE = 256  # samples per forward pass of `score_network`, at most
# Where samples have many targets of many classes: logits of a pass, of more than one sample, and
# those that are in double precision at the same time.
MOST_LOGITS = 2**22
MOST_DOUBLES = 2**20


class NetworkScore(NamedTuple):
    """How well a network classifies samples; of several targets each, those of a target."""

    accuracy: float  # percent
    loss: float  # mean cross-entropy


@torch.no_grad()
def score_network(net: nn.Module, inputs: Tensor, labels: Tensor) -> NetworkScore:
    """Accuracy and loss of `net`, in eval mode.

    net: on any device. inputs: images [B, 3, 32, 32] in [0, 1], or other samples as
    `BatchSource.samples` gives them. labels: int64 [B], or [B, K] for K targets each.
    """
    device = next((one.device for one in net.parameters()), labels.device)
    training = net.training
    net.eval()
    try:
        per_sample = net(inputs[:1].to(device)).numel()
        size = max(1, min(AT_ONCE, MOST_LOGITS // per_sample))
        losses = []
        right = []
        for part, target in zip(inputs.split(size), labels.split(size), strict=True):
            logits = net(part.to(device)).cpu().flatten(0, -2)
            rows = max(1, MOST_DOUBLES // logits.shape[1])
            for few, targets in zip(logits.split(rows), target.flatten().split(rows), strict=True):
                exact = few.double()
                losses.append(cross_entropy(exact, targets, reduction="none"))
                right.append(exact.argmax(1) == targets)
    finally:
        net.train(training)
    accuracy = 100.0 * int(torch.cat(right).sum()) / labels.numel()
    return NetworkScore(accuracy, float(torch.cat(losses).mean()))


def add_test_accuracy(net: GrownNetwork, source: BatchSource) -> None:
    """Write the accuracy of `net` on all test samples into its spec, by `score_network`."""
    source = source_of(source, net.spec["env"])
    inputs, labels = source.samples("test", torch.arange(len(source.test_labels)))
    net.spec["test_accuracy"] = score_network(net, inputs.cpu(), labels.cpu()).accuracy


def export_hosts(
    world: World,
    cfg: TrainConfig,
    states: HostStates,
    number: int,
    envs: Sequence[int],
    chosen_by: str | None = None,
) -> list[GrownHost]:
    """These hosts of the world, as they were last measured, with a spec that says so.

    envs: their numbers among all that `states` tells of. chosen_by: what they are the best by; None
    where nobody chose.
    """
    rows = [env - world.reduction.first_env for env in envs]
    columns = [part.tolist() for part in states[:4]]
    contents = [SlotContents(*(column[env] for column in columns)) for env in envs]
    sources = [source_of(world.data, env) for env in envs]
    inputs = [source.input_spec() for source in sources]
    hosts = grown_hosts(
        world.rules.nets.shape, world.weights, rows, slot_contents=contents, inputs=inputs
    )
    for env, source, host in zip(envs, sources, hosts, strict=True):
        scores = (float(part[env]) for part in (states.accuracy, states.loss))
        accuracy, loss = (None if math.isnan(one) else one for one in scores)
        own = {
            "task": cfg.task.host_name,
            "round": number,
            "seed": cfg.seed,
            "data": origin(source),
            f"validation_{source.spec.name}": world.sizes.val_samples,
            f"test_{source.spec.name}": len(source.test_labels),
            "chosen_by": chosen_by,
            "precision": str(world.rules.nets.precision).removeprefix("torch."),
            "version": package_versions()["esper-soa"],
            "env": env,
            "validation_accuracy": accuracy,
            "validation_loss": loss,
            "test_accuracy": None,
        }
        host.spec.update(own)
    return hosts
