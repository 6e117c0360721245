"""Hosts of the package's segments as data: a chain of parts, then a mean and a linear classifier.

`HostChain` is what nets/model/user_parts.py makes of a user's tuple, and host.py of the settings.
"""

from dataclasses import dataclass

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, TaskConfig
from esper_soa.nets.model.conv import ConvBlock
from esper_soa.nets.model.head import MeanLinear
from esper_soa.nets.model.residual import Residual
from esper_soa.nets.model.segments import FeatureShape, HostPart, Segment, SlotNumbers

HOST_PARTS = (ConvBlock, Residual)  # of which a user's tuple may be made
IMAGE_SHAPE: FeatureShape = (IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)


@dataclass(frozen=True)
class HostChain:
    """Segments in the order images meet them."""

    parts: tuple[HostPart, ...]
    classes: int

    modules = None  # rows begin as the tables of parameters say

    @classmethod
    def of_task(cls, task: TaskConfig) -> "HostChain":
        """The blocks that the settings describe."""
        kernel = task.kernel_size
        count = range(task.num_blocks)
        blocks = tuple(ConvBlock(task.channels(i), kernel, task.pooled(i)) for i in count)
        return cls(blocks, task.num_classes)

    def segments(self, slots: SlotNumbers) -> tuple[Segment, ...]:
        """The segments in their places; ValueError where one cannot stand there."""
        shape = IMAGE_SHAPE
        segments = list[Segment]()
        for number, part in enumerate(self.parts):
            segments.append(part.segment(number, shape, slots))
            shape = segments[-1].output_shape
        return *segments, MeanLinear(shape, self.classes)
