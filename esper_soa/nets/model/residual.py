"""The residual segment of a host, of the parts that seeds are made of; slot r0c{i} is behind it."""

import math
from dataclasses import dataclass

from torch import Tensor

from esper_soa.nets.model import blueprints, segments
from esper_soa.nets.model.parts import Parameter, Part, are_parts


@dataclass(frozen=True)
class Residual:
    """x + parts(x), of the parts that seeds are made of; C of widths are the channels of x.
    ValueError where that is no such tuple, or changes the number of channels.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not are_parts(self.parts):
            allowed = f"must be of a tuple of parts ({blueprints.PART_NAMES})"
            raise ValueError(f"a residual segment of {self.parts}: {allowed}")
        _ = self.architecture

    @property
    def architecture(self) -> blueprints.Architecture:
        """The parts as those of a seed; refuses what none could have."""
        return blueprints.Architecture(0, "of a residual segment", self.parts)

    def segment(
        self, number: int, input_shape: segments.FeatureShape, slots: segments.SlotNumbers
    ) -> "ResidualSegment":
        """The segment in its place; ValueError where it is the first."""
        if number == 0:
            raise ValueError("its first segment must be a ConvBlock: images have 3 channels")
        return ResidualSegment(
            number, self.architecture, input_shape, slot=slots.get((0, number), -1)
        )


@dataclass(frozen=True)
class ResidualSegment(segments.SlotBehind, segments.StatelessSegment):
    """x + parts(x) in its place."""

    number: int
    architecture: blueprints.Architecture
    input_shape: segments.FeatureShape
    slot: int

    kind = "residual"

    @property
    def output_shape(self) -> segments.FeatureShape:
        return self.input_shape

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return blueprints.seed_table(self.architecture, self.input_shape[0]).parameters

    @property
    def products(self) -> int:
        channels, *axes = self.input_shape
        return blueprints.seed_products(self.architecture, channels, math.prod(axes))

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        return run.fill(self.slot, blueprints.seed_forward(self.architecture, folded, x))

    def plain_parts(self) -> list[segments.PlainPart]:
        layers = blueprints.seed_layers(self.architecture, self.input_shape[0])
        return [segments.PlainPart(f"block{self.number}", layers, residual=True, slot=self.slot)]
