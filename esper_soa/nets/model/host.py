"""Hosts as a chain of segments with seed slots between them, n hosts at once.

Block: convolution, batch norm, ReLU, slot r0c{i}, max pool, slot r1c{i}; after the last block a
global mean and a linear classifier. Hosts of users' own have other segments too, each with a slot
r0c{i} behind it, and may have a head of their own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper_soa.config.nets import IMAGE_CHANNELS, SlotSpec, TaskConfig
from esper_soa.nets import batched
from esper_soa.nets.forward import seed_forward
from esper_soa.nets.model.blueprints import (
    BLUEPRINTS,
    Architecture,
    Blueprints,
    seed_layers,
    seed_products,
    seed_table,
)
from esper_soa.nets.model.host_parts import ConvBlock, HostChain
from esper_soa.nets.model.layers import Layers
from esper_soa.nets.model.parts import SPREAD, Layer, Parameter, Table, convolution, norm_parameters
from esper_soa.nets.model.user_module import OwnChain, OwnSegment


class Block(NamedTuple):
    """Static shape of a block; slot numbers index the run's enabled slots, -1 for none."""

    channels: int
    pooled: bool
    slot_before_pool: int
    slot_after_pool: int
    inputs: int  # channels
    kernel: int  # of the convolution, pixels along a side
    size: int  # height and width of what it is given and of its convolution

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Kernel of the convolution, scale and shift of its batch norm."""
        shape = (self.channels, self.inputs, self.kernel, self.kernel)
        kernel = SPREAD.tensor(shape, self.inputs * self.kernel**2)
        return kernel, *norm_parameters(self.channels)

    @property
    def statistics(self) -> tuple[Parameter, ...]:
        """Running mean and variance of its batch norm."""
        return norm_parameters(self.channels)[::-1]

    @property
    def layers(self) -> list[Layer]:
        """The plain modules before its pool, whose parameters and statistics are those above."""
        norm = {"eps": batched.NORM_EPS, "momentum": batched.BATCH_NORM_MOMENTUM}
        convolved = convolution(self.inputs, self.channels, self.kernel)
        normed = Layer("norm", "BatchNorm2d", {"num_features": self.channels, **norm})
        return [convolved, normed, Layer("relu", "ReLU", {})]

    @property
    def products(self) -> int:
        """Multiplications of an image, padding counted as pixels; so of every segment."""
        return self.size**2 * self.channels * self.inputs * self.kernel**2

    @property
    def activations(self) -> int:
        """Numbers of an image that it gives before its pool; so of every segment, behind it."""
        return self.channels * self.size**2


class Refinement(NamedTuple):
    """Static shape of a segment x + parts(x); slot numbers as of Block."""

    architecture: Architecture
    channels: int
    size: int  # height and width of its features
    slot: int  # behind it

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return seed_table(self.architecture, self.channels).parameters

    @property
    def statistics(self) -> tuple[Parameter, ...]:
        return ()  # the norms of its parts are of groups

    @property
    def layers(self) -> list[Layer]:
        """The plain modules of parts(x)."""
        return seed_layers(self.architecture, self.channels)

    @property
    def products(self) -> int:
        return seed_products(self.architecture, self.channels, self.size**2)

    @property
    def activations(self) -> int:
        return self.channels * self.size**2


Segment = Block | Refinement | OwnSegment


class HostShape(NamedTuple):
    """Everything static about the hosts of a run."""

    blocks: tuple[Segment, ...]
    num_classes: int
    slots: tuple[SlotSpec, ...]
    parameters: Table
    statistics: Table  # running mean and variance of every block's batch norm
    blueprints: Blueprints = BLUEPRINTS  # what can grow in the slots
    # Behind the blocks, in place of a global mean and a linear classifier.
    head: OwnSegment | None = None

    @property
    def execution_order(self) -> tuple[int, ...]:
        """Slot numbers in the order in which the forward pass meets them."""
        return tuple(slot for block in self.blocks for slot in slots_of(block) if slot >= 0)

    @property
    def own_chain(self) -> OwnChain | None:
        """What it is made of, where that are modules of a user's own."""
        return None if self.head is None else self.head.chain

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.blocks if self.head is None else (*self.blocks, self.head)

    @property
    def classifier_inputs(self) -> int:
        """Channels of features that the linear classifier is given; 0 where the head is another."""
        last = self.blocks[-1]
        return 0 if isinstance(last, OwnSegment) else last.channels

    @property
    def products(self) -> int:
        """Multiplications of an image's way through the host without seeds."""
        last = self.num_classes * self.classifier_inputs
        return sum(block.products for block in self.segments) + last

    def blueprint(self, code: int) -> Architecture:
        """The blueprint with this code; LookupError where there is none."""
        for one in self.blueprints:
            if one.code == code:
                return one
        known = ", ".join(f"{one.code} {one.name}" for one in self.blueprints)
        raise LookupError(f"no blueprint has the code {code}: {known}")


class SlotFiller(Protocol):
    """What the forward pass asks of whoever fills the slots, in the engine in torch."""

    def occupied(self, slot: int) -> bool:
        """False: the slot is a pass-through for all networks of this pass."""
        ...

    def fill(self, layers: Layers, slot: int, x: Tensor, pooled: bool) -> Tensor:
        """Activations after the slot, by `layers`, and after a 2x2 max pool where `pooled`.

        May return more alpha rows along the batch axis than it was given.
        """
        ...


def slots_of(segment: Segment) -> tuple[int, ...]:
    """Slot numbers of a segment in the order of the forward pass, -1 where none is enabled."""
    if isinstance(segment, Block):
        return segment.slot_before_pool, segment.slot_after_pool
    return (segment.slot,)


def plain_blocks(shape: HostShape) -> tuple[Block, ...]:
    """The segments that are blocks."""
    return tuple(one for one in shape.segments if isinstance(one, Block))


def host_shape(
    task: TaskConfig,
    slots: tuple[SlotSpec, ...],
    blueprints: Blueprints = BLUEPRINTS,
    host: HostChain | OwnChain | None = None,
) -> HostShape:
    """Static description of the hosts of `task`: enabled `slots`, `blueprints` that can grow.

    host: a chain of a user's own in place of that of the settings.
    """
    number = {(spec.row, spec.block): index for index, spec in enumerate(slots)}
    if isinstance(host, OwnChain):
        *every, last = (one._replace(slot=number.get((0, one.number), -1)) for one in host.segments)
        own, kept = _tables((*every, last))
        return HostShape(tuple(every), host.classes, slots, own, kept, blueprints, last)
    if host is None:
        kernel = task.kernel_size
        count = range(task.num_blocks)
        host = HostChain(tuple(ConvBlock(task.channels(i), kernel, task.pooled(i)) for i in count))
    inputs = IMAGE_CHANNELS
    blocks = list[Block | Refinement]()
    for i, (part, size) in enumerate(zip(host.parts, host.sides()[:-1], strict=True)):
        before = number.get((0, i), -1)
        after = number.get((1, i), -1)
        if isinstance(part, ConvBlock):
            blocks.append(Block(part.channels, part.pool, before, after, inputs, part.kernel, size))
            inputs = part.channels
        else:
            blocks.append(Refinement(part.architecture, inputs, size, before))
    tables = host_tables(blocks, task.num_classes)
    return HostShape(tuple(blocks), task.num_classes, slots, *tables, blueprints)


def host_tables(blocks: Sequence[Block | Refinement], num_classes: int) -> tuple[Table, Table]:
    """Parameters of a host, block by block and the classifier last, and its running statistics."""
    last = blocks[-1].channels
    own, kept = _tables(blocks)
    classifier = [SPREAD.tensor(shape, last) for shape in ((num_classes, last), (num_classes,))]
    return Table((*own.parameters, *classifier)), kept


def _tables(segments: Sequence[Segment]) -> tuple[Table, Table]:
    """Parameters and running statistics of the segments, one after the other."""
    own = tuple(one for segment in segments for one in segment.parameters)
    return Table(own), Table(tuple(one for segment in segments for one in segment.statistics))


def initial_hosts(shape: HostShape, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fresh rows of parameters and running statistics [n, ...] from streams `keys` (int64 [n])."""
    if shape.own_chain is not None:
        return shape.own_chain.initial_rows(keys, dtype)
    return shape.parameters.initial(keys, dtype), shape.statistics.initial(keys, dtype)


def _early_pool(block: Block, filler: SlotFiller) -> bool:
    """True where the pool can be part of the block: nothing between, and pool and ReLU commute."""
    slot = block.slot_before_pool
    return block.pooled and not (slot >= 0 and filler.occupied(slot))


def _slots(layers: Layers, segment: Segment, x: Tensor, filler: SlotFiller) -> Tensor:
    """The slots of one segment, and its pool where a seed stands before it."""
    before = segment.slot_before_pool if isinstance(segment, Block) and segment.pooled else -1
    for slot in slots_of(segment):
        if slot >= 0 and filler.occupied(slot):
            x = filler.fill(layers, slot, x, slot == before)
    return x


def own_values(
    segments: tuple[Segment, ...], parameters: list[Tensor], statistics: list[Tensor]
) -> Iterator[tuple[Segment, list[Tensor], list[Tensor]]]:
    """Every segment with its own parameters and statistics."""
    for segment in segments:
        own, parameters = _parted(parameters, len(segment.parameters))
        kept, statistics = _parted(statistics, len(segment.statistics))
        yield segment, own, kept


def _parted(tensors: list[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
    """The first `count` of them, and the rest."""
    return tensors[:count], tensors[count:]


def train_segments(
    layers: Layers,
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    x: Tensor,
    filler: SlotFiller,
) -> Tensor:
    """What the last segment gives of x [B, n*3, 32, 32] by batch statistics; running
    [n * numbers] move in place.
    """
    num_nets = parameters[0].shape[0]
    for segment, own, running in own_values(shape.segments, parameters, statistics):
        match segment:
            case Block():
                kernel, scale, shift = own
                mean, variance = running
                x = layers.train_block(
                    x, kernel, (scale, shift), (mean, variance), _early_pool(segment, filler)
                )
            case Refinement():
                x = seed_forward(layers, segment.architecture, own, x)
            case OwnSegment():
                x = segment.train(own, running, x, num_nets)
        x = _slots(layers, segment, x, filler)
    return x


def logits_of(shape: HostShape, x: Tensor, parameters: list[Tensor]) -> Tensor:
    """Logits [B, n, classes] of what comes out of the last segment."""
    if shape.head is not None:
        return x.unflatten(1, (-1, shape.num_classes))
    return batched.classify(x, *parameters[-2:])


def train_loss(
    layers: Layers,
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    batch: tuple[Tensor, Tensor],
    filler: SlotFiller,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, right answers int64, both [n], of [B, n*3, 32, 32] and labels [B, n]."""
    images, labels = batch
    x = train_segments(layers, shape, parameters, statistics, images, filler)
    if shape.head is not None:
        return batched.loss(logits_of(shape, x, parameters).to(parameters[0].dtype), labels)
    weights, bias = parameters[-2:]
    return layers.classifier_loss(x, weights, bias, labels)


def fold_batch_norm(
    shape: HostShape, parameters: list[Tensor], statistics: list[Tensor]
) -> list[Tensor]:
    """Parameters for `evaluate_forward`: kernel and bias per block, running statistics folded in.

    Of segments that are no blocks their parameters, then their statistics.
    """
    folded = list[Tensor]()
    for segment, own, running in own_values(shape.segments, parameters, statistics):
        if isinstance(segment, Block):
            kernel, scale, shift = own
            mean, variance = running
            gain = scale * torch.rsqrt(variance + batched.NORM_EPS)
            folded += [kernel * gain[:, :, None, None, None], shift - mean * gain]
        else:
            folded += own + running
    return folded if shape.head is not None else folded + parameters[-2:]


def evaluate_forward(
    layers: Layers, shape: HostShape, folded: list[Tensor], x: Tensor, filler: SlotFiller
) -> Tensor:
    """Logits [rows * B, n, classes] with running statistics; `filler` may multiply alpha rows."""
    rest = folded
    num_nets = folded[0].shape[0]
    for segment in shape.segments:
        match segment:
            case Block():
                (kernel, bias), rest = _parted(rest, 2)
                x = layers.infer_block(x, kernel, bias, _early_pool(segment, filler))
            case Refinement():
                own, rest = _parted(rest, len(segment.parameters))
                x = seed_forward(layers, segment.architecture, own, x)
            case OwnSegment():
                own, rest = _parted(rest, len(segment.parameters))
                kept, rest = _parted(rest, len(segment.statistics))
                x = segment.infer(own, kept, x, num_nets)
        x = _slots(layers, segment, x, filler)
    return logits_of(shape, x, folded)
