"""CNN hosts as a chain of segments with seed slots between them, n hosts at once.

Block: convolution, batch norm, ReLU, slot r0c{i}, max pool, slot r1c{i}; after the last block a global mean and a
linear classifier. What stands in the slots is the business of the `SlotFiller` that the engine in torch hands in.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec, TaskConfig
from esper_soa.nets.layers import Layers
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, Blueprints, check_codes, of_code
from esper_soa.nets.model.parameters import Parameter, Table, norm_scale, offset, weight, zeros


class Block(NamedTuple):
    """Static shape of one block; slot numbers index the run's enabled slots, -1 where none is enabled."""

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
        kernel = weight(self.channels, self.inputs, self.kernel, self.kernel)
        return kernel, norm_scale(self.channels), zeros(self.channels)

    @property
    def statistics(self) -> tuple[Parameter, ...]:
        """Running mean and variance of its batch norm."""
        return zeros(self.channels), norm_scale(self.channels)

    @property
    def products(self) -> int:
        """Multiplications of an image's convolution, padding counted as pixels."""
        return self.size**2 * self.channels * self.inputs * self.kernel**2


class HostShape(NamedTuple):
    """Everything static about the hosts of a run."""

    blocks: tuple[Block, ...]
    num_classes: int
    slots: tuple[SlotSpec, ...]
    parameters: Table
    statistics: Table  # running mean and variance of every block's batch norm
    blueprints: Blueprints = BLUEPRINTS  # what can grow in the slots

    @property
    def execution_order(self) -> tuple[int, ...]:
        """Slot numbers in the order in which the forward pass meets them."""
        met = [slot for block in self.blocks for slot in (block.slot_before_pool, block.slot_after_pool)]
        return tuple(slot for slot in met if slot >= 0)

    @property
    def products(self) -> int:
        """Multiplications of an image's way through the host without seeds."""
        return sum(block.products for block in self.blocks) + self.num_classes * self.blocks[-1].channels

    def blueprint(self, code: int) -> Architecture:
        """The blueprint with this code; LookupError where there is none."""
        return of_code(self.blueprints, code)


class SlotFiller(Protocol):
    """What the forward pass asks of whoever fills the slots."""

    def occupied(self, slot: int) -> bool:
        """False: the slot is a pass-through for all networks of this pass."""
        ...

    def fill(self, layers: Layers, slot: int, x: Tensor, pooled: bool) -> Tensor:
        """Activations after the slot, computed by `layers`, and after a 2x2 max pool where `pooled`.

        May return more alpha rows along the batch axis than it was given.
        """
        ...


def host_shape(task: TaskConfig, slots: tuple[SlotSpec, ...], blueprints: Blueprints = BLUEPRINTS) -> HostShape:
    """Static description of the hosts of `task` with the enabled `slots`, in which `blueprints` can grow.

    Raises ValueError where two of these have the same code.
    """
    check_codes(blueprints)
    number = {(spec.row, spec.block): index for index, spec in enumerate(slots)}
    inputs, size, blocks = IMAGE_CHANNELS, IMAGE_SIZE, []
    for i in range(task.num_blocks):
        channels, pooled = task.base_channels * 2**i, i < task.num_pools
        places = number.get((0, i), -1), number.get((1, i), -1)
        blocks.append(Block(channels, pooled, *places, inputs, task.kernel_size, size))
        inputs, size = channels, size // 2 if pooled else size
    parameters, statistics = host_tables(tuple(blocks), task.num_classes)
    return HostShape(tuple(blocks), task.num_classes, slots, parameters, statistics, blueprints)


def host_tables(blocks: tuple[Block, ...], num_classes: int) -> tuple[Table, Table]:
    """Parameters of a host, block by block and the classifier's last, and its running statistics."""
    last = blocks[-1].channels
    parameters = [parameter for block in blocks for parameter in block.parameters]
    parameters += [weight(num_classes, last), offset(num_classes, last)]
    return Table(tuple(parameters)), Table(tuple(one for block in blocks for one in block.statistics))


def _early_pool(block: Block, filler: SlotFiller) -> bool:
    """True where the pool can be part of the block: nothing stands between, and pool and ReLU commute."""
    return block.pooled and not (block.slot_before_pool >= 0 and filler.occupied(block.slot_before_pool))


def _slots(layers: Layers, block: Block, x: Tensor, filler: SlotFiller) -> Tensor:
    """The slots of one block, and its pool where a seed stands before it."""
    if block.slot_before_pool >= 0 and filler.occupied(block.slot_before_pool):
        x = filler.fill(layers, block.slot_before_pool, x, block.pooled)
    if block.slot_after_pool >= 0 and filler.occupied(block.slot_after_pool):
        x = filler.fill(layers, block.slot_after_pool, x, False)
    return x


def _train_blocks(
    layers: Layers,
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    x: Tensor,
    filler: SlotFiller,
) -> Tensor:
    """Activations behind the last block; batch statistics are used, running statistics [n*C] move in place."""
    for i, block in enumerate(shape.blocks):
        kernel, scale, shift = parameters[3 * i : 3 * i + 3]
        running = (statistics[2 * i], statistics[2 * i + 1])
        x = layers.train_block(x, kernel, (scale, shift), running, _early_pool(block, filler))
        x = _slots(layers, block, x, filler)
    return x


def train_forward(
    layers: Layers,
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    x: Tensor,
    filler: SlotFiller,
) -> Tensor:
    """Logits [B, n, classes] of images x [B, n*3, 32, 32]; batch statistics, running statistics [n*C] move in place."""
    return batched.classify(_train_blocks(layers, shape, parameters, statistics, x, filler), *parameters[-2:])


def train_loss(
    layers: Layers,
    shape: HostShape,
    parameters: list[Tensor],
    statistics: list[Tensor],
    batch: tuple[Tensor, Tensor],
    filler: SlotFiller,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy [n] and correct answers int64 [n] of a batch, images [B, n*3, 32, 32] and labels [B, n]."""
    images, labels = batch
    x = _train_blocks(layers, shape, parameters, statistics, images, filler)
    weights, bias = parameters[-2:]
    return layers.classifier_loss(x, weights, bias, labels)


def fold_batch_norm(shape: HostShape, parameters: list[Tensor], statistics: list[Tensor]) -> list[Tensor]:
    """Parameters for `evaluate_forward`: kernel and bias per block with the running statistics folded in."""
    folded = []
    for i in range(len(shape.blocks)):
        kernel, scale, shift = parameters[3 * i : 3 * i + 3]
        mean, variance = statistics[2 * i : 2 * i + 2]
        gain = scale * torch.rsqrt(variance + batched.NORM_EPS)
        folded += [kernel * gain[:, :, None, None, None], shift - mean * gain]
    return folded + parameters[-2:]


def evaluate_forward(layers: Layers, shape: HostShape, folded: list[Tensor], x: Tensor, filler: SlotFiller) -> Tensor:
    """Logits [rows * B, n, classes] with running statistics; `filler` may multiply the alpha rows on the way."""
    for i, block in enumerate(shape.blocks):
        x = layers.infer_block(x, folded[2 * i], folded[2 * i + 1], _early_pool(block, filler))
        x = _slots(layers, block, x, filler)
    return batched.classify(x, *folded[-2:])
