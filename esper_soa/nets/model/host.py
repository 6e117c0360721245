"""Hosts as chains of segments, n hosts at once: rows of numbers, training, validation."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec, TaskConfig
from esper_soa.nets.model import segments
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, Blueprints
from esper_soa.nets.model.conv import ConvBlock
from esper_soa.nets.model.head import MeanLinear
from esper_soa.nets.model.parts import Table
from esper_soa.nets.model.residual import Residual
from esper_soa.nets.model.segments import FeatureShape, Forward, HeadSegment, Segment, Values
from esper_soa.nets.model.transformer import Transformer

HOST_PARTS = (ConvBlock, Residual)  # of which a user's tuple may be made
IMAGE_SHAPE: FeatureShape = (IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
MOST_INDEXED = (
    2**31 - 1
)  # elements of a tensor that kernels of GPUs, which index with 32 bits, can take


@dataclass(frozen=True)
class HostChain:
    """Segments in the order images meet them."""

    parts: tuple[segments.HostPart, ...]
    classes: int
    inputs: FeatureShape = IMAGE_SHAPE  # of an image

    @classmethod
    def of_task(cls, task: TaskConfig, inputs: FeatureShape) -> "HostChain":
        """The blocks that the settings describe."""
        count = range(task.num_blocks)
        blocks = tuple(ConvBlock(task.channels(i), task.kernel_size, task.pooled(i)) for i in count)
        return cls(blocks, task.classes, inputs)

    def segments(self, slots: segments.SlotNumbers) -> tuple[Segment, ...]:
        """The segments in their places; ValueError where one cannot stand there."""
        shape = self.inputs
        body = list[Segment]()
        for number, part in enumerate(self.parts):
            body.append(part.segment(number, shape, slots))
            shape = body[-1].output_shape
        return *body, MeanLinear(shape, self.classes)


@runtime_checkable
class InitialRows(Protocol):
    """A Host that makes the first rows itself, as tables of its parameters say nothing about it."""

    def initial_rows(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows of parameters and running statistics [n, ...] from streams `keys` (int64 [n])."""


class HostShape(NamedTuple):
    """Everything static about the hosts of a run."""

    segments: tuple[Segment, ...]  # in the order of the forward pass; the last gives the logits
    slots: tuple[SlotSpec, ...]
    parameters: Table
    statistics: Table
    blueprints: Blueprints = BLUEPRINTS  # what can grow in the slots
    modules: InitialRows | None = None  # a user's modules that the hosts are made of

    @property
    def input_shape(self) -> FeatureShape:
        """Shape of a sample that goes in."""
        return self.segments[0].input_shape

    @property
    def head(self) -> HeadSegment:
        """The last segment."""
        return cast(HeadSegment, self.segments[-1])

    @property
    def num_classes(self) -> int:
        return self.head.output_shape[0]

    @property
    def execution_order(self) -> tuple[int, ...]:
        """Slot numbers in the order in which the forward pass meets them."""
        return tuple(slot for segment in self.segments for slot in segment.slots if slot >= 0)

    @property
    def products(self) -> int:
        """Multiplications of a sample's way through the host without seeds."""
        return sum(segment.products for segment in self.segments)

    def blueprint(self, code: int) -> Architecture:
        """The blueprint with this code; LookupError where there is none."""
        for blueprint in self.blueprints:
            if blueprint.code == code:
                return blueprint
        known = ", ".join(f"{blueprint.code} {blueprint.name}" for blueprint in self.blueprints)
        raise LookupError(f"no blueprint has the code {code}: {known}")


@runtime_checkable
class Host(Protocol):
    """Hosts as settings or a user describe them; static, as segments are. See InitialRows."""

    def segments(self, slots: segments.SlotNumbers) -> tuple[Segment, ...]:
        """The segments with their slots; the last gives the logits."""


HOST_KINDS: dict[str, Callable[[TaskConfig, FeatureShape], Host]] = {
    "chain": HostChain.of_task,
    "transformer": lambda task, _: Transformer(task),
}


def host_shape(
    task: TaskConfig,
    slots: tuple[SlotSpec, ...],
    blueprints: Blueprints = BLUEPRINTS,
    host: Host | None = None,
    inputs: FeatureShape = IMAGE_SHAPE,
) -> HostShape:
    """Static description of the hosts of `task`, or of a user's `host`: enabled `slots`,
    `blueprints` that can grow, images of the shape `inputs`. ValueError for a segment that does not
    take the features of the segment before.
    """
    host = HOST_KINDS[task.host](task, inputs) if host is None else host
    chain = host.segments({(spec.row, spec.block): index for index, spec in enumerate(slots)})
    for number, (before, segment) in enumerate(pairwise(chain), 1):
        if before.output_shape != segment.input_shape:
            shapes = f"{list(segment.input_shape)}, not {list(before.output_shape)}"
            raise ValueError(f"segment {number} of the host takes features {shapes}")
    return HostShape(
        tuple(chain),
        slots,
        Table(tuple(tensor for segment in chain for tensor in segment.parameters)),
        statistics=Table(tuple(tensor for segment in chain for tensor in segment.statistics)),
        blueprints=blueprints,
        modules=host if isinstance(host, InitialRows) else None,
    )


def foreign_segments(shape: HostShape, kinds: Collection[str]) -> str:
    """The segments of none of `kinds`, in words ("1 (residual), 3 (residual)"); "" for none."""
    each = enumerate(segment.kind for segment in shape.segments)
    return ", ".join(f"{at} ({kind})" for at, kind in each if kind not in kinds)


def initial_hosts(shape: HostShape, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fresh rows of parameters and running statistics [n, ...] from streams `keys` (int64 [n])."""
    if shape.modules is not None:
        return shape.modules.initial_rows(keys, dtype)
    return shape.parameters.initial(keys, dtype), shape.statistics.initial(keys, dtype)


def split_values(
    chain: Sequence[Segment], parameters: list[Tensor], statistics: list[Tensor]
) -> Iterator[tuple[Segment, Values]]:
    """Every segment with its tensors, those that it borrows last."""
    rest = iter(parameters)
    moving = iter(statistics)
    for segment in chain:
        tensors = list(islice(rest, len(segment.parameters)))
        tensors += [parameters[place] for place in segment.borrowed]
        yield segment, Values(tensors, list(islice(moving, len(segment.statistics))))


def train_loss(
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    batch: tuple[Tensor, Tensor],
    filler: segments.SlotFiller,
    noise: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean loss and right answers int64, both [n], of inputs [B, n*C, ...] and labels [B, n, ...],
    by batch statistics; running ones [n * numbers] move in place. noise: as of Forward.
    """
    x, labels = batch
    run = Forward(filler, parameters[0].shape[0], parameters[0].dtype, noise=noise)
    *body, (_, head_values) = split_values(shape.segments, parameters, statistics)
    for segment, values in body:
        x = segment.train(run, values, x)
    return shape.head.train_loss(run, head_values, x, labels=labels)


def fold_batch_norm(
    shape: HostShape, parameters: list[Tensor], statistics: list[Tensor]
) -> list[list[Tensor]]:
    """The tensors of every segment for `evaluate_forward`, running statistics folded in."""
    pairs = split_values(shape.segments, parameters, statistics)
    return [segment.fold(values) for segment, values in pairs]


def evaluate_forward(
    shape: HostShape, folded: list[list[Tensor]], x: Tensor, filler: segments.SlotFiller
) -> Tensor:
    """Logits [rows * B, n, classes] with running statistics; `filler` may multiply alpha rows."""
    run, x = _features(shape, folded, x, filler=filler)
    return shape.head.infer(run, folded[-1], x)


def evaluate_loss(
    shape: HostShape,
    folded: list[list[Tensor]],
    batch: tuple[Tensor, Tensor],
    filler: segments.SlotFiller,
    row: int,
) -> tuple[Tensor, Tensor]:
    """Sum of losses [n] in alpha row `row` and right targets int64 [rows, n, B] of B inputs and
    labels, with running statistics; `filler` may multiply alpha rows.
    """
    run, x = _features(shape, folded, batch[0], filler=filler)
    return shape.head.measure(run, folded[-1], x, labels=batch[1], row=row)


def _features(
    shape: HostShape, folded: list[list[Tensor]], x: Tensor, filler: segments.SlotFiller
) -> tuple[Forward, Tensor]:
    like = next(tensor for tensors in folded for tensor in tensors)
    run = Forward(filler, like.shape[0], like.dtype)
    for segment, tensors in zip(shape.segments[:-1], folded[:-1], strict=True):
        x = segment.infer(run, tensors, x)
    return run, x


def activation_elements(shape: HostShape, inputs: int, rows: int = 1) -> int:
    """Elements of the largest tensor of a forward pass, per network and sample of so many `inputs`;
    rows: alpha rows at the end, at most; each slot may double them.
    """
    current = 1
    largest = inputs
    for segment in shape.segments:
        largest = max(largest, current * segment.activations)
        for spec in (shape.slots[slot] for slot in segment.slots if slot >= 0):
            current = min(2 * current, rows)
            fitting = [blueprint for blueprint in shape.blueprints if blueprint.fits(spec)]
            width = max(max(blueprint.widths(spec.channels)) for blueprint in fitting)
            largest = max(largest, current * spec.positions * width)
    return largest
