"""Checks networks of users' own blueprints and hosts: several at once, as a run has them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig
from esper_soa.config.registry import RAISES, collect_faults
from esper_soa.nets.model import host as hosts
from esper_soa.nets.model import user_parts
from esper_soa.nets.model.blueprints import Architecture, initial_seeds, seed_forward, seed_table
from esper_soa.nets.model.host import HostChain
from esper_soa.nets.model.segments import FeatureShape
from esper_soa.nets.model.user_segment import UserHost
from esper_soa.nets.seeds.seeds import TrainingSeeds
from esper_soa.system import streams

TRIAL_NETS = 3  # networks and images of a trial
TRIAL_IMAGES = 4
TOLERANCE = 1e-6  # relative difference of an image's features that rounding may make


class Networks(NamedTuple):
    """How networks of several envs at once are tried, seeds and hosts alike."""

    size: tuple[int, ...]  # of inputs, [B, ..., n*C]: the channels stand last in memory
    start: Callable[[], tuple[Tensor, Tensor]]  # fresh rows of parameters and of buffers [n, ...]
    outputs: Callable[[Tensor, Tensor, Tensor], Tensor]  # [B, n, ...] of rows, buffers, inputs
    # A number [n] per network to differentiate, and buffers behind the pass.
    train: Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]

    def inputs(self, seed: int) -> Tensor:
        """[B, n*C, ...] of numbers in [-1, 1)."""
        keys = streams.stream_keys(seed, streams.SEED_INIT, (1,), envs=torch.tensor(0))
        numbers = streams.uniform(keys, torch.arange(math.prod(self.size)))
        return (2 * numbers - 1).view(self.size).movedim(-1, 1)


def seed_networks(blueprint: Architecture, shape: FeatureShape) -> Networks:
    """Seeds in slots of features of this shape."""
    channels, *axes = shape
    keys = streams.stream_keys(0, streams.SEED_INIT, (0,), envs=torch.arange(TRIAL_NETS))
    blends = torch.zeros(TRIAL_NETS, dtype=torch.bool)
    table = seed_table(blueprint, channels)

    def start() -> tuple[Tensor, Tensor]:
        rows = initial_seeds(blueprint, channels, keys, multiply=blends, dtype=torch.float32)
        return rows, torch.zeros(TRIAL_NETS, 0)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        return seed_forward(blueprint, table.unpack(rows), x).unflatten(1, (TRIAL_NETS, channels))

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        target = nets.inputs(3).unflatten(1, (TRIAL_NETS, channels))
        products = outputs(rows, kept, nets.inputs(1)) * target
        return products.transpose(0, 1).flatten(1).sum(1), []

    nets = Networks((TRIAL_IMAGES, *axes, TRIAL_NETS * channels), start, outputs, train=train)
    return nets


def host_networks(host: HostChain | UserHost, classes: int) -> Networks:
    """Hosts without seeds."""
    shape = hosts.host_shape(TaskConfig(num_classes=classes), (), host=host)
    keys = streams.stream_keys(0, streams.HOST_INIT, (0,), envs=torch.arange(TRIAL_NETS))
    labels = torch.arange(TRIAL_IMAGES)[:, None].expand(-1, TRIAL_NETS) % shape.num_classes
    filler = TrainingSeeds([], TRIAL_NETS)

    def outputs(rows: Tensor, kept: Tensor, x: Tensor) -> Tensor:
        parameters = shape.parameters.unpack(rows)
        folded = hosts.fold_batch_norm(shape, parameters, shape.statistics.unpack(kept))
        return hosts.evaluate_forward(shape, folded, x, filler=filler)

    def train(rows: Tensor, kept: Tensor) -> tuple[Tensor, list[Tensor]]:
        statistics = [buffer.flatten().clone() for buffer in shape.statistics.unpack(kept)]
        parameters = shape.parameters.unpack(rows)
        batch = nets.inputs(1), labels
        return hosts.train_loss(shape, parameters, statistics, batch=batch, filler=filler)[
            0
        ], statistics

    start = partial(hosts.initial_hosts, shape, keys, torch.float32)
    channels, *axes = shape.input_shape
    size = (TRIAL_IMAGES, *axes, TRIAL_NETS * channels)
    nets = Networks(size, start, outputs, train=train)
    return nets


def training_findings(make: Callable[[], Networks], faults: Sequence[str]) -> list[str]:
    """Faults of networks that `make` makes. Where the part is known to have `faults`, errors of its
    networks may follow from these: they are left out, but for random numbers that no fault names.
    """
    found = list[str]()
    with collect_faults(found):
        found += _network_findings(make())
    follows = (user_parts.BATCHED_CALL, RAISES)
    known = user_parts.DRAWS_WORDS in "".join(faults)
    return [
        finding
        for finding in found
        if not faults
        or not finding.startswith(follows)
        or (user_parts.RANDOM_WORDS in finding and not known)
    ]


def _network_findings(nets: Networks) -> list[str]:
    rows, kept = nets.start()
    found = []
    pairs = zip(nets.start(), (rows, kept), strict=True)
    if not all(torch.equal(again.nan_to_num(), other.nan_to_num()) for again, other in pairs):
        found.append(
            "its initial values differ though the env is the same: it has other draws than torch's"
        )
    if not (rows.isfinite().all() and kept.isfinite().all()):
        return [*found, "its initial values are not finite"]
    with collect_faults(found, user_parts.BATCHED_CALL), torch.no_grad():
        found += _pass_findings(nets, rows, kept)
    with collect_faults(found, user_parts.BATCHED_CALL):
        found += _gradient_findings(nets, rows, kept)
    return found


def _pass_findings(nets: Networks, rows: Tensor, kept: Tensor) -> list[str]:
    """Chance, numbers that are not finite, networks or images of a batch that know one another."""
    x = nets.inputs(1)
    other = nets.inputs(2)
    channels = x.shape[1] // TRIAL_NETS
    out = nets.outputs(rows, kept, x)
    found = []
    if not torch.equal(out, nets.outputs(rows, kept, x)):
        found.append("a second pass gives something else: it keeps state or draws random numbers")
    if not out.isfinite().all():
        found.append("its output is not finite")
    others = torch.cat([rows[:1], 2 * rows[1:] + 0.1])
    elsewhere = _channels_last(torch.cat([x[:, :channels], other[:, channels:]], dim=1))
    if not torch.equal(nets.outputs(others, kept, elsewhere)[:, 0], out[:, 0]):
        found.append("the output of env 0 depends on the networks of other envs")
    alone = nets.outputs(rows, kept, _channels_last(torch.cat([x[:1], other[1:]])))[0]
    if (alone - out[0]).abs().max() > TOLERANCE * out[0].abs().max().clamp(min=1):
        found.append("the output of an image depends on the other images of its batch")
    return found


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _gradient_findings(nets: Networks, rows: Tensor, kept: Tensor) -> list[str]:
    """Faults of gradients and running buffers in a training pass."""
    leaf = rows.clone().requires_grad_()
    losses, statistics = nets.train(leaf, kept)
    if not losses.requires_grad:
        return ["no gradient reaches its parameters: its output is cut off from them"]
    (gradient,) = torch.autograd.grad(losses[0], [leaf])
    found = []
    if not gradient.isfinite().all():
        found.append("the gradient of its parameters is not finite")
    if gradient[1:].any():
        found.append("a gradient reaches parameters of env 1 from the output of env 0")
    if not gradient[0].any():
        found.append(
            "the gradient of all of its parameters is 0 as it begins: it could never learn"
        )
    if not all(buffer.isfinite().all() for buffer in statistics):
        found.append("its buffers are not finite after a training pass")
    return found
