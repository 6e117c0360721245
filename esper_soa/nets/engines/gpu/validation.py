"""Validation batches of N networks as a fixed list of launches: subset rows are a masked tree."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import IMAGE_SIZE
from esper_soa.nets.engines.gpu import blocks, slots
from esper_soa.nets.engines.gpu.blocks import COLOURS
from esper_soa.nets.engines.gpu.kernels.head import (
    HeadOutputs,
    advance_kernel,
    evaluation_sums_kernel,
    head_evaluate_kernel,
)
from esper_soa.nets.engines.gpu.kernels.images import cut_
from esper_soa.nets.engines.gpu.slots import SlotWorkspace
from esper_soa.nets.engines.gpu.step import PassStep, Plans, head_outputs
from esper_soa.nets.engines.gpu.tree import TreeLevel
from esper_soa.nets.setup import Setup


class ValidationSums(NamedTuple):
    """The rows of an env-step, and what it gives; memory of its own."""

    roots: Tensor  # int32 [N], rows before the first slot: 0 of a network that has ended
    levels: list[TreeLevel]  # by slot, in execution order
    loss: Tensor  # float64 [N], of row 0, sum over images
    correct: Tensor  # int64 [N, R]
    counted: Tensor  # int64 [N], images with a label


class ValidationMemory(NamedTuple):
    """All that a batch needs."""

    images: Tensor  # [1 or N, B, 1024, COLOURS]
    features: list[Tensor]  # by segment of the chain: [N * rows, B, H*W, C]
    places: dict[int, SlotWorkspace]  # by slot
    spares: dict[int, Tensor]  # by slot: [programs, H*W, C]
    answers: HeadOutputs
    right: Tensor  # int8 [N, images], whether answers of row 0 are; stays as it was where none is


@dataclass(eq=False)
class ValidationStep(PassStep):
    """The batches of a validation pass, one after the other."""

    sums: ValidationSums
    memory: ValidationMemory | None = None

    def step_(self, variant: int) -> None:
        """One batch under all subset rows."""
        inputs = self.given
        sums = self.sums
        if self.memory is None:
            extent = MemorySizes(
                inputs.slot_flags.shape[0],
                inputs.first.shape[0],
                self.batch,
                images=inputs.first.shape[1],
                rows=[level.rows for level in sums.levels],
                programs=slots.num_programs(inputs.first.device),
            )
            self.memory = memory_of(self.setup, self.plans, extent, device=inputs.first.device)
        memory = self.memory
        cut_(self.crops, inputs.counter, memory.images)
        features, branches = self._forward_(memory)
        units, batch = features.shape[:2]
        head = self.head(features)
        right = memory.right, memory.right.shape[1]
        head_evaluate_kernel[units, batch](features, memory.answers, right, branches, head)
        evaluation_sums_kernel[units,](memory.answers, sums[2:], branches, head)
        advance_kernel[1,](inputs.counter)

    def _forward_(self, memory: ValidationMemory) -> tuple[Tensor, tuple[int, Tensor]]:
        room = iter(memory.features)
        levels = iter(self.sums.levels)
        x = memory.images
        branches = 1, self.sums.roots
        for plan in self.plans.blocks:
            features = next(room)
            blocks.evaluate_(
                plan, x, self.block_weights(plan), features=features, branches=branches
            )
            x = features
            for place in plan.places:
                number = place[0]
                slot = self.slot(place, memory.places[number])
                pooled = next(room)
                level = next(levels)
                tree = branches[0], level.rows, *level
                slots.branch_(slot, x, pooled, spare=memory.spares[number], tree=tree)
                x = pooled
                branches = level.rows, level.counts
        return x, branches


class MemorySizes(NamedTuple):
    """Sizes that determine the memory of a step."""

    num_nets: int  # N
    image_sets: int  # 1, or N where every network has its own
    batch: int  # B
    images: int  # of a pass
    rows: list[int]  # behind every slot in execution order
    programs: int  # of slots.branch_


def memory_of(
    setup: Setup, plans: Plans, extent: MemorySizes, device: torch.device
) -> ValidationMemory:
    """Memory of a step."""
    size = (extent.image_sets, extent.batch, IMAGE_SIZE**2, COLOURS)
    images = torch.empty(size, dtype=setup.precision, device=device)
    last = 1
    row_counts = iter(extent.rows)
    features = list[Tensor]()
    places = dict[int, SlotWorkspace]()
    spares = dict[int, Tensor]()

    def room(side: int, channels: int) -> Tensor:
        return images.new_empty(extent.num_nets * last, extent.batch, side**2, channels)

    for plan in plans.blocks:
        features.append(room(plan.norm_side, plan.outputs))
        for number, side, pooled in plan.places:
            last = next(row_counts)
            features.append(room(side // 2 if pooled else side, plan.outputs))
            places[number] = slots.slot_workspace(
                plans.slots[number], extent.programs, (side, side), like=images, gradients=False
            )
            spares[number] = images.new_empty(extent.programs, side**2, plan.outputs)
    answers = head_outputs(setup.shape, extent.num_nets * last, extent.batch, like=images)
    right = torch.zeros(extent.num_nets, extent.images, dtype=torch.int8, device=device)
    return ValidationMemory(images, features, places, spares=spares, answers=answers, right=right)
