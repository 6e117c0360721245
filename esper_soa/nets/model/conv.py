"""The block of a host: convolution, batch norm, ReLU, slot r0c{i}, 2x2 max pool, slot r1c{i}."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.nets import IMAGE_SIZE, MAX_CHANNELS
from esper_soa.nets import batched
from esper_soa.nets.model import segments
from esper_soa.nets.model.parts import SPREAD, LayerSpec, Parameter, convolution, norm_parameters

CONV_BLOCK = "conv_block"


@dataclass(frozen=True)
class ConvBlock:
    """Same-padded convolution without bias, batch norm, ReLU, and a 2x2 max pool where `pool`;
    ValueError for numbers that no block has.
    """

    channels: int  # of its output
    kernel: int = 3  # pixels along a side, odd
    pool: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise ValueError(f"a block of {self.channels} channels: must be in [1, {MAX_CHANNELS}]")
        if not 1 <= self.kernel < IMAGE_SIZE or self.kernel % 2 == 0:
            allowed = f"must be odd and in [1, {IMAGE_SIZE - 1}]"
            raise ValueError(f"a block with a kernel of {self.kernel} pixels: {allowed}")

    def segment(
        self, number: int, input_shape: segments.FeatureShape, slots: segments.SlotNumbers
    ) -> "ConvSegment":
        """The block in its place; ValueError where it pools features of one pixel."""
        inputs, size, _ = input_shape
        if self.pool and size < 2:
            raise ValueError(f"its segment {number} pools features of one pixel")
        return ConvSegment(
            number,
            self.channels,
            self.pool,
            slot_before_pool=slots.get((0, number), -1),
            slot_after_pool=slots.get((1, number), -1),
            inputs=inputs,
            kernel=self.kernel,
            size=size,
        )


@dataclass(frozen=True)
class ConvSegment:
    """A convolution block in its place; slot numbers index the run's enabled slots, -1 for none.

    Who adds a field that changes what it computes gives it another kind, or writes it in the
    kernels of every engine that knows this kind.
    """

    number: int
    channels: int  # of its output
    pooled: bool
    slot_before_pool: int
    slot_after_pool: int
    inputs: int  # channels
    kernel: int  # of the convolution, pixels along a side
    size: int  # height and width of its input and of its convolution

    kind = CONV_BLOCK
    borrowed = ()

    @property
    def input_shape(self) -> segments.FeatureShape:
        return self.inputs, self.size, self.size

    @property
    def output_shape(self) -> segments.FeatureShape:
        return self.slot_shapes[-1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Kernel of the convolution, scale and shift of its batch norm."""
        shape = self.channels, self.inputs, self.kernel, self.kernel
        return SPREAD.tensor(shape, math.prod(shape[1:])), *norm_parameters(self.channels)

    @property
    def statistics(self) -> tuple[Parameter, ...]:
        """Running mean and variance of its batch norm."""
        return norm_parameters(self.channels)[::-1]

    @property
    def slots(self) -> tuple[int, ...]:
        return self.slot_before_pool, self.slot_after_pool

    @property
    def slot_shapes(self) -> tuple[segments.FeatureShape, ...]:
        sizes = (self.size, self.size // 2) if self.pooled else (self.size,)
        return tuple((self.channels, size, size) for size in sizes)

    @property
    def products(self) -> int:
        return self.size**2 * self.channels * self.inputs * self.kernel**2

    @property
    def activations(self) -> int:
        """Numbers before its pool."""
        return self.channels * self.size**2

    def train(self, run: segments.Forward, values: segments.Values, x: Tensor) -> Tensor:
        kernel, scale, shift = values.parameters
        mean, variance = values.statistics
        x = batched.batch_norm(batched.conv2d(x, kernel), scale, shift, mean=mean, var=variance)
        return self._through_slots(run, x)

    def fold(self, values: segments.Values) -> list[Tensor]:
        """Kernel and bias of a convolution that is its batch norm as well."""
        kernel, scale, shift = values.parameters
        mean, variance = values.statistics
        gain = scale * torch.rsqrt(variance + batched.NORM_EPS)
        return [kernel * gain[:, :, None, None, None], shift - mean * gain]

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        kernel, bias = folded
        return self._through_slots(run, batched.conv2d(x, kernel, bias))

    def _through_slots(self, run: segments.Forward, x: Tensor) -> Tensor:
        """ReLU, slots and pool, which comes first where no seed stands before it: they commute."""
        if self.pooled and not run.occupied(self.slot_before_pool):
            x = F.max_pool2d(x, 2)
        x = F.relu(x, inplace=True)
        x = run.fill(self.slot_before_pool, x, self.pooled)
        return run.fill(self.slot_after_pool, x)

    def plain_parts(self) -> list[segments.PlainPart]:
        kernel = convolution(self.inputs, self.channels, self.kernel)
        norm = {"eps": batched.NORM_EPS, "momentum": batched.BATCH_NORM_MOMENTUM}
        batch_norm = LayerSpec("norm", "BatchNorm2d", {"num_features": self.channels, **norm})
        layers = [kernel, batch_norm, LayerSpec("relu", "ReLU", {})]
        block = segments.PlainPart(f"block{self.number}", layers, slot=self.slot_before_pool)
        pool = [LayerSpec("pool", "MaxPool2d", {"kernel_size": 2})]
        pool_part = segments.PlainPart(f"pool{self.number}", pool, slot=self.slot_after_pool)
        return [block, pool_part] if self.pooled else [block]


def conv_segments(chain: Iterable[segments.Segment]) -> tuple[ConvSegment, ...]:
    """The convolution blocks of a chain."""
    return tuple(segment for segment in chain if isinstance(segment, ConvSegment))
