"""Memory that networks, their samples and their training need, counted of the setup.

Every part is a lower bound, so what is refused for want of it could not have run. An engine says
what it needs beside (engine.py), the agent what learning does; runtime/memory.py has all of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from esper_soa.config.nets import IMAGES, LOSS_SETTINGS, SIZE_SETTINGS
from esper_soa.config.ranges import env_words
from esper_soa.nets.data.orders import MAX_STORED
from esper_soa.nets.model.parts import DRAWN_AT_ONCE
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import state_width

FLOAT = 4  # bytes of a number
MIB = 2**20
GIB = 2**30
DRAW_BYTES = 16  # bytes of a random number while it is drawn: its place and its hash, both int64
# When needs arise that pass.
BUILT = "building"
PASSED = "a pass of training"
UPDATED = "a step"


class Need(NamedTuple):
    """Memory for one thing, and the settings that make it small."""

    what: str
    size: int  # bytes
    settings: tuple[str, ...]
    during: str = ""  # when it is needed, if not always


def at_once(parts: Sequence[Need]) -> int:
    """Bytes that are needed at the same time: all that lasts, and the most of what passes."""
    times = dict.fromkeys([need.during for need in parts], 0)
    for need in parts:
        times[need.during] += need.size
    lasting_bytes = times.pop("", 0)
    return lasting_bytes + max(times.values(), default=0)


def network_needs(setup: Setup) -> list[Need]:
    """Needs of the weights and the samples, and of what draws both."""
    shape = setup.shape
    spec = setup.spec
    data = setup.data
    narrower = SIZE_SETTINGS.get(setup.task.host, ())
    rows = sum(sum(row_layout(shape, slot)) for slot in range(len(shape.slots)))
    numbers = shape.parameters.total + rows
    # parameters, what the optimizer keeps, snapshot
    weights = 2 * numbers + state_width(setup.task.optimizer, numbers) + 2 * shape.statistics.total
    drawn = DRAW_BYTES * min(setup.num_envs * shape.parameters.total, DRAWN_AT_ONCE)
    hosts = drawn + FLOAT * setup.num_envs * shape.parameters.total
    most = max(data.synthetic_train, data.synthetic_test, data.validation_images)
    is_drawn = any(part.name == "synthetic" for part in data.sets)
    samples = DRAW_BYTES * spec.elements * most * is_drawn
    settings = ("data.synthetic_train", "data.synthetic_test")
    train, others = setup.unread
    # numbers in the order of a pass, with several data sets over the part of each env
    orders = 0 if data.split else setup.num_envs // len(env_words(data.name)) * train
    order = 8 * setup.num_envs * setup.train_samples + FLOAT * orders * (orders <= MAX_STORED)
    stored = spec.train_bytes * train + spec.test_bytes * others
    sleepers = setup.effects.sleepers
    twins = Need("weights of twins", sleepers * FLOAT * (weights + train), ("effects.rows",))
    return [
        *[twins] * bool(sleepers),
        Need("weights", setup.num_envs * FLOAT * weights, ("envs", *narrower)),
        Need("drawing the weights of the hosts", hosts, ("envs", *narrower), during=BUILT),
        Need(f"the order of the {spec.name}", order, ("train_samples", "envs")),
        Need(f"drawing the synthetic {spec.name}", samples, settings, during=BUILT),
        Need(f"the {spec.name}", stored, ("data.root",)),
    ]


def training_needs(setup: Setup, in_place: bool) -> list[Need]:
    """Needs of networks that train side by side: copies of their rows, activations, losses; then
    gradients and what a step makes of them. in_place: on a CPU, network by network, as kernels do.
    """
    shape = setup.shape
    narrower = SIZE_SETTINGS.get(setup.task.host, ())
    num_nets = min(setup.workers * (1 if in_place else setup.env_chunk), setup.num_envs)
    if setup.device.type != "cpu":
        in_place = True
        num_nets = min(setup.env_chunk, setup.num_envs)
    elements = setup.spec.elements + sum(segment.activations for segment in shape.segments)
    activations = FLOAT * num_nets * setup.batch_size * elements
    smaller = ("batch_size", "compute.env_chunk", *narrower[:1])
    each = min(setup.env_chunk, setup.num_envs)
    losses = min(setup.workers, setup.num_envs) * shape.head.loss_bytes(each, setup.batch_size)
    loss_settings = LOSS_SETTINGS.get(setup.task.host, smaller)
    parts = [
        Need("activations of the batches in training", activations, smaller, during=PASSED),
        Need("losses", losses, loss_settings, during=PASSED),
    ]
    if in_place:
        return parts
    row = FLOAT * num_nets * shape.parameters.total
    copies = row + FLOAT * num_nets * state_width(setup.task.optimizer, shape.parameters.total)
    settings = ("compute.workers", "compute.env_chunk", *narrower)
    copied = [
        Need("networks in training", copies, settings, during=time) for time in (PASSED, UPDATED)
    ]
    return [*parts, *copied, Need("gradients of the hosts", 3 * row, settings, during=UPDATED)]


def least_training_needs(setup: Setup) -> list[Need]:
    """Those of the engine that takes the least, of all that may be chosen for these networks."""
    torch_alone = setup.compute.engine == "torch"
    images = setup.shape.slots[0].topology == IMAGES
    return training_needs(setup, in_place=images and not torch_alone)
