"""The hosts' blocks on a GPU: what the kernels of a block are told, and their launches.

Convolution, batch norm, ReLU and max pool of n networks; activations are [n, B, H*W, C]. A forward
pass is three launches, a backward pass four, without a gradient of the images three.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from esper_soa.nets.engines.gpu.kernels import block
from esper_soa.nets.engines.gpu.kernels.block import Upstream
from esper_soa.nets.engines.gpu.kernels.tiles import (
    KernelLayer,
    KernelTile,
    Rows,
    constants,
    plane,
    rows,
    tile_of,
)
from esper_soa.nets.engines.gpu.tile_sizes import block_tile, shared_limit
from esper_soa.nets.model.conv import conv_segments
from esper_soa.nets.model.host import HostShape

COLOURS = 4  # numbers per pixel of an image: three, and a zero so that they are loaded together
PIXELS_PER_SPLIT = 1024
STATISTICS_REGISTERS = 80  # of a thread; the assembler aims at fewer and spills
TILES_PER_SPLIT = 4  # that a program sums up one after the other, at least, where there are


class BlockPlan(NamedTuple):
    """Where a block stands in a host and in its rows."""

    number: int
    inputs: int
    stored: int  # channels of its input in memory
    outputs: int
    kernel: int
    side: int  # height and width
    pool: int  # 2 where the block's own kernel pools
    slot_pool: bool  # the pool stands behind the slot before it
    before: int  # slot, -1 = none
    after: int
    weight_at: int  # columns of the parameters
    statistics_at: int

    @property
    def norm_at(self) -> int:
        """Column of the norm's scale; its shift follows."""
        return self.weight_at + self.outputs * self.inputs * self.kernel**2

    @property
    def norm_side(self) -> int:
        """Height and width of the features that its kernels give."""
        return self.side // self.pool

    @property
    def places(self) -> list[tuple[int, int, bool]]:
        """Slots in the order of the forward pass: number, side of what it is given, if pooled."""
        before = [(self.before, self.side, self.slot_pool)] if self.before >= 0 else []
        return before + ([(self.after, self.out_side, False)] if self.after >= 0 else [])

    @property
    def out_side(self) -> int:
        """Height and width behind its last slot."""
        return self.norm_side // 2 if self.slot_pool else self.norm_side


def block_plans(shape: HostShape) -> list[BlockPlan]:
    """All blocks of a host."""
    plans = list[BlockPlan]()
    weight_at = 0
    statistics_at = 0
    for number, segment in enumerate(conv_segments(shape.segments)):
        early = segment.pooled and segment.slot_before_pool < 0
        plan = BlockPlan(
            number,
            segment.inputs,
            segment.inputs if number else COLOURS,
            outputs=segment.channels,
            kernel=segment.kernel,
            side=segment.size,
            pool=2 if early else 1,
            slot_pool=segment.pooled and not early,
            before=segment.slot_before_pool,
            after=segment.slot_after_pool,
            weight_at=weight_at,
            statistics_at=statistics_at,
        )
        plans.append(plan)
        weight_at += plan.outputs * (plan.inputs * plan.kernel**2 + 2)
        statistics_at += 2 * plan.outputs
    return plans


def num_splits(batch: int, shape: HostShape) -> int:
    """Parts of the sums over the pixels of a batch: a function of the batch alone."""
    pixels = batch * conv_segments(shape.segments)[0].size ** 2
    return max(1, min(block.MAX_SPLITS.value, pixels // PIXELS_PER_SPLIT))


class Weights(NamedTuple):
    """A block's columns of the pools: of its kernel, then of its batch norm."""

    kernel: Rows
    scale: Rows
    shift: Rows
    mean: Rows
    variance: Rows


def weights_of(plan: BlockPlan, params: Tensor, statistics: Tensor) -> Weights:
    """Views of params [n, P] and statistics [n, Q]."""
    at = plan.norm_at
    size = plan.outputs
    moving = plan.statistics_at
    return Weights(
        rows(params[:, plan.weight_at : at]),
        rows(params[:, at : at + size]),
        rows(params[:, at + size : at + 2 * size]),
        mean=rows(statistics[:, moving : moving + size]),
        variance=rows(statistics[:, moving + size : moving + 2 * size]),
    )


class BlockMemory(NamedTuple):
    """Activations that a block saves for its backward pass, and buffers."""

    output: Tensor  # [n, B, H*W, O] of the convolution; its gradient in a backward pass
    features: Tensor  # [n, B, ., O] behind norm, ReLU and its own pool
    codes: Tensor  # uint8, as features: place of the maximum in its window
    partials: Tensor  # float32 [n, tiles, 2, O]
    statistics: Tensor  # float32 [2 n, O]


def memory_of(plan: BlockPlan, num_nets: int, batch: int, like: Tensor) -> BlockMemory:
    """Memory for B = `batch` images, in the format of `like`."""
    _, _, tiles, _ = _launch(plan, batch, like)
    features = like.new_empty(num_nets, batch, plan.norm_side**2, plan.outputs)
    wide = like.new_empty(0, dtype=torch.float32)
    return BlockMemory(
        like.new_empty(num_nets, batch, plan.side**2, plan.outputs),
        features,
        torch.empty_like(features, dtype=torch.uint8),
        partials=wide.new_empty(num_nets, tiles, 2, plan.outputs),
        statistics=wide.new_empty(2 * num_nets, plan.outputs),
    )


def forward_(
    plan: BlockPlan, x: Tensor, weights: Weights, memory: BlockMemory, slot_flags: Tensor
) -> None:
    """features of `memory` from x [n, B, H*W, C]; running statistics move. slot_flags: [n, S]."""
    num_nets, batch = memory.output.shape[:2]
    layer, tile, tiles, options = _launch(plan, batch, x, words=rows(slot_flags))
    output = plane(memory.output)
    block.conv_kernel[num_nets, tiles](
        plane(x), weights.kernel, output, memory.partials, layer, tile, **options
    )
    moved = weights.mean, weights.variance
    block.statistics_kernel[num_nets,](
        memory.partials, memory.statistics, moved, tiles, layer, tile, maxnreg=STATISTICS_REGISTERS
    )
    pooled = triton.cdiv(batch * plan.norm_side**2, tile.pixels.value)
    statistics = rows(memory.statistics)
    affine = weights.scale, weights.shift
    block.norm_pool_kernel[num_nets, pooled](
        output, statistics, affine, plane(memory.features), plane(memory.codes), layer, tile
    )


def backward_(
    plan: BlockPlan,
    x: Tensor,
    weights: Weights,
    memory: BlockMemory,
    gradients: tuple[Tensor, Tensor | None],
    partials: Tensor,
    slot_flags: Tensor,
) -> None:
    """Gradients of the block's parameters, to their columns of partials [n, splits, P], and of x.

    gradients: of the block's features, and room for that of x, or None. Split 0 has the norm's.
    """
    (num_nets, batch), (splits, width) = memory.output.shape[:2], partials.shape[1:]
    layer, tile, tiles, options = _launch(plan, batch, x, words=rows(slot_flags))
    output = plane(memory.output)
    upstream = Upstream(plane(gradients[0]), output, plane(memory.codes))
    statistics = rows(memory.statistics)
    parts, share = _split(batch * plan.norm_side**2, splits, tile)
    block.norm_sums_kernel[num_nets, parts](
        upstream, statistics, memory.partials, share, layer, tile
    )
    sums = memory.partials, parts
    norm = weights.scale, Rows(partials[:, 0, plan.norm_at :], splits * width)
    parts, share = _split(layer.num_pixels, splits, tile)
    block.output_gradient_kernel[num_nets, parts](
        upstream, statistics, norm, sums, share, layer, tile
    )
    if gradients[1] is not None:
        block.input_gradient_kernel[num_nets, tiles](
            output, weights.kernel, plane(gradients[1]), layer, tile, **options
        )
    columns = triton.cdiv(plan.stored * plan.kernel**2, tile.group.value)
    target = Rows(partials[:, 0, plan.weight_at :], splits * width)
    block.weight_gradient_kernel[num_nets, parts, columns](
        output, plane(x), target, width, share, layer, tile, num_stages=1
    )


def evaluate_(
    plan: BlockPlan, x: Tensor, weights: Weights, features: Tensor, branches: tuple[int, Tensor]
) -> None:
    """features [n * rows, B, ., O] by running statistics from x [n * rows or 1, B, H*W, C].

    branches: (rows, int32 [n] of how many of them a network has).
    """
    units, batch = features.shape[:2]
    layer, tile, _, options = _launch(plan, batch, x)
    tiles = triton.cdiv(batch * plan.norm_side**2, tile.pixels.value)
    images = plane(x, shared=x.shape[0] == 1)
    block.evaluation_kernel[units, tiles](
        images, plane(features), weights.kernel, weights[1:], branches, layer, tile, **options
    )


def _split(pixels: int, splits: int, tile: KernelTile) -> tuple[int, int]:
    """(splits, at most so many, pixels of each, in whole tiles)."""
    tiles = triton.cdiv(pixels, tile.pixels.value)
    parts = min(splits, triton.cdiv(tiles, TILES_PER_SPLIT))
    return parts, triton.cdiv(tiles, parts) * tile.pixels.value


def _launch(
    plan: BlockPlan, batch: int, x: Tensor, words: Rows | None = None
) -> tuple[KernelLayer, KernelTile, int, dict[str, int]]:
    """Records of a batch for kernels; number of tiles of the full map, and options of a launch."""
    sizes = constants(
        height=plan.side,
        width=plan.side,
        inputs=plan.inputs,
        stored=plan.stored,
        outputs=plan.outputs,
        size=plan.kernel,
        pool=plan.pool,
    )
    layer = KernelLayer(batch * plan.side**2, **sizes)._replace(words=words)
    limit = shared_limit(x.device)
    chosen = block_tile(plan.stored, plan.outputs, plan.kernel**2, dtype=x.dtype, limit=limit)
    tile = tile_of(layer, x.dtype, chosen)
    tiles = triton.cdiv(layer.num_pixels, tile.pixels.value)
    return layer, tile, tiles, {"num_stages": chosen.stages}
