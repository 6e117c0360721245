"""The protocol of the segments that hosts are chains of, for n networks at once.

Every kind is a class in a file for itself: conv.py, residual.py, head.py, user_segment.py. host.py
and the export of networks know this protocol alone, so a new kind is a new file; where users may
write it in a host's tuple, host.py names it. An engine with kernels asks a segment for its `kind`
and refuses kinds that it does not know.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper_soa.nets.model.parts import LayerSpec, Parameter

# (C,) of vectors, (C, T) of sequences or (C, H, W) of images, without batch and networks
FeatureShape = tuple[int, ...]
SlotNumbers = Mapping[tuple[int, int], int]  # number of an enabled slot, by (row, segment)
Scores = tuple[Tensor, Tensor]  # losses and numbers of right answers


class SlotFiller(Protocol):
    """The interface by which the torch engine's forward pass fills slots."""

    def occupied(self, slot: int) -> bool:
        """False: the slot is a pass-through for all networks of this pass."""

    def fill(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        """Activations after the slot, and after a 2x2 max pool where `pooled`; of more alpha rows
        along the batch axis than x has where the filler makes some.
        """


class Forward(NamedTuple):
    """A forward pass of n networks, as their segments see it."""

    filler: SlotFiller | None  # None: all slots are empty
    num_nets: int
    dtype: torch.dtype  # of the weights, in which losses are computed
    # Streams int64 [n] of what networks draw in this batch, as dropout; None: nothing is drawn.
    noise: Callable[[], Tensor] | None = None

    def occupied(self, slot: int) -> bool:
        """Whether a seed of any network stands in the slot; False for slot -1."""
        return slot >= 0 and self.filler is not None and self.filler.occupied(slot)

    def fill(self, slot: int, x: Tensor, pooled: bool = False) -> Tensor:
        """Activations after the slot, and a pool where `pooled`; x where it is not occupied."""
        if self.filler is None or not self.occupied(slot):
            return x
        return self.filler.fill(slot, x, pooled)


class PlainPart(NamedTuple):
    """One entry of a grown network: plain modules one after the other, or x + modules(x)."""

    name: str
    layers: list[LayerSpec]
    residual: bool = False
    slot: int = -1  # number of the slot behind it, -1 for none
    counts_batches: bool = False  # whether rows hold num_batches_tracked of batch norms


class Values(NamedTuple):
    """The tensors of a segment of n networks."""

    parameters: list[Tensor]  # [n, *shape]; those that it borrows last
    statistics: list[Tensor]  # [n, *shape]; in training [n * numbers], which move in place


class Segment(Protocol):
    """One segment of the hosts of a run, static and hashable: its shape, numbers and what it
    computes. Activations are [B, n*C, ...]; the last segment gives logits [B, n, classes].
    """

    @property
    def kind(self) -> str:
        """Name by which engines know what it computes."""

    @property
    def input_shape(self) -> FeatureShape: ...

    @property
    def output_shape(self) -> FeatureShape:
        """Shape behind its last slot; (classes,) of the last segment."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameter tensors of one network, in row order."""

    @property
    def borrowed(self) -> tuple[int, ...]:
        """Numbers of parameter tensors of the host, of other segments, that it uses as well."""

    @property
    def statistics(self) -> tuple[Parameter, ...]:
        """Running statistics of one network, which training moves without a gradient."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Numbers of its slots in the order of the forward pass, -1 where one is not enabled."""

    @property
    def slot_shapes(self) -> tuple[FeatureShape, ...]:
        """Shape of the features in each slot that it offers, by row."""

    @property
    def products(self) -> int:
        """Multiplications of a sample, padding counted."""

    @property
    def activations(self) -> int:
        """Numbers of a sample that its layers give and the backward pass keeps."""

    def train(self, run: Forward, values: Values, x: Tensor) -> Tensor:
        """Activations behind its slots."""

    def fold(self, values: Values) -> list[Tensor]:
        """The tensors that `infer` takes."""

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        """Activations by running statistics; the first may get x [B, C, ...], shared by all."""

    def plain_parts(self) -> list[PlainPart]:
        """The modules of one network, in the order of `parameters` and `statistics`."""


class HeadSegment(Segment, Protocol):
    """The last segment: it is asked for losses and right answers. Nothing else sees the logits of a
    pass, so it may make them in pieces. Labels: int64 [B, n], or [B, n, K] for K targets.
    """

    def loss_bytes(self, num_nets: int, batch: int) -> int:
        """Bytes of float32 that `train_loss` of so many samples takes beside activations."""

    def train_loss(self, run: Forward, values: Values, x: Tensor, labels: Tensor) -> Scores:
        """Mean loss [n] of all targets and right answers int64 [n], in training."""

    def measure(
        self, run: Forward, folded: list[Tensor], x: Tensor, labels: Tensor, row: int
    ) -> Scores:
        """Sum of the losses [n] in alpha row `row` and right targets of each sample, int64
        [rows, n, B]; label -1 does not count. x [rows*B, n*C, ...].
        """


class SlotBehind:
    """Part of a segment with one slot, behind all of it; `slot`: its number, -1 for none."""

    slot: int

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    @property
    def slot_shapes(self: Segment) -> tuple[FeatureShape, ...]:
        return (self.output_shape,)

    @property
    def activations(self: Segment) -> int:
        return math.prod(self.output_shape)


class StatelessSegment(ABC):
    """Part of a segment without running statistics, which computes the same in both modes."""

    statistics = ()
    borrowed: tuple[int, ...] = ()

    @abstractmethod
    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor: ...

    def train(self, run: Forward, values: Values, x: Tensor) -> Tensor:
        return self.infer(run, values.parameters, x)

    def fold(self, values: Values) -> list[Tensor]:
        return values.parameters


class HostPart(Protocol):
    """A segment as users write it, without the facts that follow from its place in a host."""

    def segment(self, number: int, input_shape: FeatureShape, slots: SlotNumbers) -> Segment:
        """The segment with this number in its host; ValueError where it cannot stand there."""
