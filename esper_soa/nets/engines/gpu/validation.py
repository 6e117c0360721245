"""Validation batches of N networks as a fixed list of launches: subset rows are a masked tree."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.nets import IMAGE_SIZE
from esper_soa.nets.engine import NetsConfig
from esper_soa.nets.engines.gpu import blocks, slots
from esper_soa.nets.engines.gpu.blocks import COLOURS, Branches
from esper_soa.nets.engines.gpu.kernels.head import (
    Answers,
    advance_kernel,
    evaluation_sums_kernel,
    head_evaluate_kernel,
)
from esper_soa.nets.engines.gpu.slots import WorkPlaces
from esper_soa.nets.engines.gpu.step import PassStep, Plans, activation_kind, answers_of, cut_
from esper_soa.nets.engines.gpu.tree import TreeLevel


class ValidationSums(NamedTuple):
    """The rows of an env-step, and what it gives; memory of its own."""

    levels: list[TreeLevel]  # by slot, in execution order
    loss: Tensor  # float64 [N], of row 0, sum over images
    correct: Tensor  # int64 [N, R]
    counted: Tensor  # int64 [N], images with a label


class ValidationMemory(NamedTuple):
    """All that a batch needs."""

    images: Tensor  # [1 or N, B, 1024, COLOURS]
    features: list[Tensor]  # by segment of the chain: [N * rows, B, H*W, C]
    places: dict[int, WorkPlaces]  # by slot
    spares: dict[int, Tensor]  # by slot: [programs, H*W, C]
    answers: Answers
    one: Tensor  # int32 [N], the rows before the first slot


@dataclass(eq=False)
class ValidationStep(PassStep):
    """The batches of a validation pass, one after the other."""

    sums: ValidationSums
    memory: ValidationMemory | None = None

    def step_(self, variant: int) -> None:
        """One batch under all subset rows."""
        given = self.given
        sums = self.sums
        if self.memory is None:
            programs = slots.num_programs(given.first.device)
            rows = [level.rows for level in sums.levels]
            size = given.roster.shape[0], given.first.shape[0], self.batch
            extent = Extent(*size, rows, programs)
            self.memory = memory_of(self.nets, self.plans, extent, given.first.device)
        memory = self.memory
        cut_(self.crops, given.counter, memory.images)
        features, branches = self._forward_(memory)
        units, batch = features.shape[:2]
        head = self.head(features)
        head_evaluate_kernel[units, batch](features, memory.answers, tuple(branches), head)
        evaluation_sums_kernel[units,](memory.answers, sums[1:], tuple(branches), head)
        advance_kernel[1,](given.counter)

    def _forward_(self, memory: ValidationMemory) -> tuple[Tensor, Branches]:
        """Features behind the last block, and their rows."""
        room = iter(memory.features)
        levels = iter(self.sums.levels)
        x = memory.images
        branches = Branches(1, memory.one)
        for plan in self.plans.blocks:
            features = next(room)
            blocks.evaluate_(plan, x, self.block_weights(plan), features, branches)
            x = features
            for place in plan.places:
                number = place[0]
                slot = self.slot(place, memory.places[number])
                behind = next(room)
                level = next(levels)
                tree = branches.rows, level.rows, *level
                slots.branch_(slot, x, behind, memory.spares[number], tree)
                x = behind
                branches = Branches(level.rows, level.counts)
        return x, branches


class Extent(NamedTuple):
    """What decides how much memory a step takes."""

    num_nets: int  # N
    image_sets: int  # 1, or N where every network has its own
    batch: int  # B
    rows: list[int]  # behind every slot in execution order
    programs: int  # of slots.branch_


def memory_of(
    nets: NetsConfig, plans: Plans, extent: Extent, device: torch.device
) -> ValidationMemory:
    """Memory of a step."""
    size = (extent.image_sets, extent.batch, IMAGE_SIZE**2, COLOURS)
    kind = activation_kind(nets)
    images = torch.empty(size, dtype=kind, device=device)
    last = 1
    left = iter(extent.rows)
    features = list[Tensor]()
    places = dict[int, WorkPlaces]()
    spares = dict[int, Tensor]()

    def room(side: int, channels: int) -> Tensor:
        return images.new_empty(extent.num_nets * last, extent.batch, side**2, channels)

    for plan in plans.blocks:
        features.append(room(plan.norm_side, plan.outputs))
        for number, side, pooled in plan.places:
            last = next(left)
            features.append(room(side // 2 if pooled else side, plan.outputs))
            places[number] = slots.work_places(
                plans.slots[number], extent.programs, (side, side), images, False
            )
            spares[number] = images.new_empty(extent.programs, side**2, plan.outputs)
    answers = answers_of(nets.shape, extent.num_nets * last, extent.batch, images)
    one = torch.ones(extent.num_nets, dtype=torch.int32, device=device)
    return ValidationMemory(images, features, places, spares, answers, one)
