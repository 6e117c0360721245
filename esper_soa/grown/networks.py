"""Hosts of a world as they were last measured, taken out as plain networks, and their scores."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper_soa.env.topology import HostStates
from esper_soa.env.world import World
from esper_soa.grown.build import GrownHost, SlotContents, grown_hosts
from esper_soa.grown.class_scores import class_scores
from esper_soa.grown.module_files import BY_CLASS, digest
from esper_soa.grown.plain import evaluating
from esper_soa.nets.data.batches import BatchSource, origin
from esper_soa.nets.data.image_set import ImageSet, source_of
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import UserError
from esper_soa.system.versions import package_versions

# Share of a loss by which a network that was taken out may differ from what a run has measured.
MOST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
MAX_SAMPLES = 256  # per forward pass of `score_network`
# Limits where samples have many targets of many classes: logits of a pass, unless of a single
# sample, and those that are in double precision at the same time.
MAX_LOGITS = 2**22
MAX_DOUBLES = 2**20


class NetworkScore(NamedTuple):
    """Scores of a network on samples; means over all targets where samples have several."""

    accuracy: float  # percent
    loss: float  # mean cross-entropy


@torch.no_grad()
def score_network(net: nn.Module, inputs: Tensor, labels: Tensor) -> NetworkScore:
    """Accuracy and loss of `net`, in eval mode.

    net: on any device. inputs: images [B, 3, 32, 32] in [0, 1], or other samples as
    `BatchSource.samples` gives them. labels: int64 [B], or [B, K] for K targets each.
    """
    device = next((weight.device for weight in net.parameters()), labels.device)
    with evaluating(net):
        per_sample = net(inputs[:1].to(device)).numel()
        size = max(1, min(MAX_SAMPLES, MAX_LOGITS // per_sample))
        losses = []
        right = []
        for part, target in zip(inputs.split(size), labels.split(size), strict=True):
            logits = net(part.to(device)).cpu().flatten(0, -2)
            rows = max(1, MAX_DOUBLES // logits.shape[1])
            for few, targets in zip(logits.split(rows), target.flatten().split(rows), strict=True):
                exact = few.double()
                losses.append(cross_entropy(exact, targets, reduction="none"))
                right.append(exact.argmax(1) == targets)
    accuracy = 100.0 * int(torch.cat(right).sum()) / labels.numel()
    return NetworkScore(accuracy, float(torch.cat(losses).mean()))


@torch.no_grad()
def score_classes(net: GrownNetwork, inputs: Tensor, labels: Tensor) -> dict:
    """`class_scores` of `net` on samples of one label each, as of `score_network`."""
    device = next((weight.device for weight in net.parameters()), labels.device)
    with evaluating(net):
        parts = [net(part.to(device)).cpu() for part in inputs.split(MAX_SAMPLES)]
    return class_scores(torch.cat(parts).double().numpy(), labels.cpu().numpy())


def add_test_accuracy(net: GrownNetwork, source: BatchSource) -> None:
    """Write the accuracy of `net` on all test samples into its spec, by `score_network`, and of a
    user's images what `score_classes` says.
    """
    source = source_of(source, net.spec["env"])
    inputs, labels = source.samples("test", torch.arange(len(source.test_labels)))
    net.spec["test_accuracy"] = score_network(net, inputs.cpu(), labels.cpu()).accuracy
    if isinstance(source, ImageSet) and source.num_classes is not None:
        net.spec[BY_CLASS] = score_classes(net, inputs, labels)
    net.measured = digest(net.state_dict())


def export_hosts(
    world: World,
    states: HostStates,
    number: int,
    envs: Sequence[int],
    chosen_by: str | None = None,
) -> list[GrownHost]:
    """Hosts of the world as they were last measured, with a spec that says so.

    envs: numbers of the hosts among all in `states`. chosen_by: the measure by which they are the
    best; None where nobody chose.
    """
    rows = [env - world.reduction.first_env for env in envs]
    columns = [part.tolist() for part in states[:4]]
    contents = [SlotContents(*(column[env] for column in columns)) for env in envs]
    sources = [source_of(world.data, env) for env in envs]
    inputs = [source.input_spec() for source in sources]
    hosts = grown_hosts(
        world.setup.shape, world.weights, rows, slot_contents=contents, inputs=inputs
    )
    for env, source, host in zip(envs, sources, hosts, strict=True):
        scores = (float(part[env]) for part in (states.accuracy, states.loss))
        accuracy, loss = (score if math.isfinite(score) else None for score in scores)
        measured = {
            "task": world.setup.task.host_name,
            "round": number,
            "seed": world.setup.seed,
            "data": origin(source),
            f"validation_{source.spec.name}": world.setup.val_samples,
            f"test_{source.spec.name}": len(source.test_labels),
            "chosen_by": chosen_by,
            "precision": str(world.setup.precision).removeprefix("torch."),
            "version": package_versions()["esper-soa"],
            "env": env,
            "validation_accuracy": accuracy,
            "validation_loss": loss,
            "test_accuracy": None,
        }
        if isinstance(source, ImageSet) and source.class_names:
            host.spec["class_names"] = list(source.class_names)
        host.spec.update(measured)
    _check_user_parts(world, hosts, rows)
    return hosts


def _check_user_parts(world: World, hosts: Sequence[GrownHost], rows: Sequence[int]) -> None:
    """Compare a host with each user's part with what was measured; UserError where they differ."""
    seen = set[str]()
    for host, row in zip(hosts, rows, strict=True):
        parts = chain(host.spec["host"], host.spec["seeds"])
        kinds = {
            layer["kind"] for part in parts for layer in part["layers"] if ":" in layer["kind"]
        }
        loss = host.spec["validation_loss"]
        if kinds <= seen or loss is None or not math.isfinite(loss):
            continue
        seen |= kinds
        order = world.validation_order
        places = order[row] if order.dim() == 2 and len(order) > 1 else order.flatten()
        inputs, labels = world.data.samples("validation", places[places >= 0])
        alone = score_network(host.network(), inputs.cpu(), labels.cpu()).loss
        most = MOST_DIFFERENCE[world.setup.precision] * max(1.0, loss)
        if not abs(alone - loss) <= most:
            problem = f"its loss is {alone:.4f}, and that which the run has measured {loss:.4f}"
            names = ", ".join(sorted(kinds))
            raise UserError(f"{names}: a network with it, taken out, is another one: {problem}")
