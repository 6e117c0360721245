"""Validation batches of N networks as one fixed list of launches: all subset rows of all networks
as one masked tree.

The step is a graphs.StaticStep with one key for a whole run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.engine import NetsConfig
from esper_soa.nets.engines.gpu import blocks, slots
from esper_soa.nets.engines.gpu.blocks import COLOURS, Branches
from esper_soa.nets.engines.gpu.classifier import answers_of, head_of
from esper_soa.nets.engines.gpu.images import cut_
from esper_soa.nets.engines.gpu.kernels.head import (
    Answers,
    advance_kernel,
    evaluation_sums_kernel,
    head_evaluate_kernel,
)
from esper_soa.nets.engines.gpu.kernels.images import Crops
from esper_soa.nets.engines.gpu.slots import Seeds, WorkPlaces
from esper_soa.nets.engines.gpu.training import Plans, activation_kind
from esper_soa.nets.engines.gpu.tree import Level
from esper_soa.state import STATE_FLOAT


class ValidationInputs(NamedTuple):
    """What tells one env-step from another, and what it gives; memory of its own."""

    first: Tensor  # int64 [1 or N, V]: bytes of the bank at which images begin
    labels: Tensor  # int64 [1 or N, V]; -1 does not count
    roster: Tensor  # int32 [N, S], see roster.py
    alpha: Tensor  # float32 [N, S]
    levels: list[Level]  # by slot, in execution order
    counter: Tensor  # int32 [1], batches so far
    loss: Tensor  # float64 [N], of row 0, sum over images
    correct: Tensor  # int64 [N, R]
    counted: Tensor  # int64 [N], images with a label


class Memory(NamedTuple):
    """All that a batch needs."""

    images: Tensor  # [1 or N, B, 1024, COLOURS]
    features: list[Tensor]  # by segment of the chain: [N * rows, B, H*W, C]
    places: list[WorkPlaces]  # by slot
    spares: list[Tensor]  # by slot: [programs, H*W, C]
    answers: Answers
    one: Tensor  # int32 [N], the rows before the first slot


@dataclass(eq=False)
class ValidationStep:
    """The batches of a validation pass, one after the other."""

    nets: NetsConfig
    plans: Plans
    weights: TensorDict
    inputs: ValidationInputs
    crops: Crops  # of the bank; its `first` is that of the inputs
    batch: int  # images of each network
    memory: Memory | None = None

    def buffers(self) -> list[Tensor]:
        """What differs from one env-step to the next."""
        own = [value for value in self.inputs if isinstance(value, Tensor)]
        return own + [
            part for level in self.inputs.levels for part in (level.counts, level.origins)
        ]

    def step_(self, variant: int) -> None:
        """One batch under all subset rows."""
        if self.memory is None:
            self.memory = memory_of(self.nets, self.plans, self._extent(), self.inputs.first.device)
        memory = self.memory
        inputs = self.inputs
        cut_(self.crops, inputs.counter, memory.images)
        features, branches = self._forward_(memory)
        params = self.weights["host", "params"]
        head = head_of(self.nets.shape, params, inputs.labels, inputs.counter, features)
        head_evaluate_kernel[features.shape[:2]](features, memory.answers, tuple(branches), head)
        sums = inputs.loss, inputs.correct, inputs.counted
        evaluation_sums_kernel[features.shape[0],](memory.answers, sums, tuple(branches), head)
        advance_kernel[1,](inputs.counter)

    def _extent(self) -> "Extent":
        inputs = self.inputs
        rows = [level.rows for level in inputs.levels]
        programs = slots.num_programs(inputs.first.device)
        return Extent(inputs.roster.shape[0], inputs.first.shape[0], self.batch, rows, programs)

    def _forward_(self, memory: Memory) -> tuple[Tensor, Branches]:
        """Features behind the last block, and their rows."""
        host = self.weights["host"]
        room = iter(memory.features)
        levels = iter(self.inputs.levels)
        x = memory.images
        branches = Branches(1, memory.one)
        for plan in self.plans.blocks:
            weights = blocks.weights_of(plan, host["params"], host["statistics"])
            features = next(room)
            blocks.evaluate_(plan, x, weights, features, branches)
            x = features
            for number, side, pooled in plan.places:
                target = next(room)
                level = next(levels)
                self._slot_(
                    memory, (number, side, pooled), (x, target), (branches.rows, level.rows, *level)
                )
                x = target
                branches = Branches(level.rows, level.counts)
        return x, branches

    def _slot_(
        self,
        memory: Memory,
        place: tuple[int, int, bool],
        features: tuple[Tensor, Tensor],
        tree: tuple[int, int, Tensor, Tensor],
    ) -> None:
        """The features before a slot, room for those behind; place: slot, side, whether pooled."""
        number, side, pooled = place
        rows = self.weights["seeds", self.nets.shape.slots[number].name, "params"]
        seeds = Seeds(self.inputs.roster, self.inputs.alpha)
        slot = slots.slot_of(
            self.plans.slots[number], seeds, rows, memory.places[number], (side, side), pooled
        )
        slots.branch_(slot, *features, memory.spares[number], tree)


class Extent(NamedTuple):
    """What decides how much memory a step takes."""

    num_nets: int  # N
    image_sets: int  # 1, or N where every network has its own
    batch: int  # B
    rows: list[int]  # behind every slot in execution order
    programs: int  # of slots.branch_


def memory_of(nets: NetsConfig, plans: Plans, extent: Extent, device: torch.device) -> Memory:
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
    numbers = range(len(plans.slots))
    return Memory(
        images,
        features,
        [places[number] for number in numbers],
        [spares[number] for number in numbers],
        answers_of(nets.shape, extent.num_nets * last, extent.batch, images),
        torch.ones(extent.num_nets, dtype=torch.int32, device=device),
    )


def fresh_sums(
    num_nets: int, rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(counter, loss, correct, counted) of a pass that begins; rows: R."""
    counts = torch.zeros(num_nets, rows + 1, dtype=torch.int64, device=device)
    loss = torch.zeros(num_nets, dtype=STATE_FLOAT, device=device)
    return (
        torch.zeros(1, dtype=torch.int32, device=device),
        loss,
        counts[:, 1:].contiguous(),
        counts[:, 0].contiguous(),
    )


def num_batches(images: int, batch: int) -> int:
    """Batches that hold all images; the last may be filled up."""
    return triton.cdiv(images, batch)
