"""Validation batches of N networks as one fixed list of launches: all subset rows of all networks as one masked tree.

The step is a graphs.StaticStep with one key for a whole run. Called by engine.py.
"""

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


class _Memory(NamedTuple):
    images: Tensor  # [1 or N, B, 1024, COLOURS]
    features: list[Tensor]  # by segment of the chain: [N * rows, B, H*W, C]
    places: list[WorkPlaces]  # by slot
    spares: list[Tensor]  # by slot: [programs, H*W, C]
    answers: Answers
    one: Tensor  # int32 [N], the rows before the first slot


class ValidationStep:
    """The batches of a validation pass, one after the other."""

    def __init__(
        self, nets: NetsConfig, plans: Plans, weights: TensorDict, inputs: ValidationInputs, crops: Crops, batch: int
    ) -> None:
        """crops: of the bank; its `first` is that of the inputs."""
        self.nets, self.plans, self.weights, self.inputs, self.crops = nets, plans, weights, inputs, crops
        self.batch = batch
        self.memory: _Memory | None = None

    def buffers(self) -> list[Tensor]:
        """What differs from one env-step to the next."""
        own = [value for value in self.inputs if isinstance(value, Tensor)]
        return own + [part for level in self.inputs.levels for part in (level.counts, level.origins)]

    def step_(self, variant: int) -> None:
        """One batch under all subset rows."""
        if self.memory is None:
            self.memory = _Builder(self).memory()
        memory, inputs = self.memory, self.inputs
        cut_(self.crops, inputs.counter, memory.images)
        features, branches = self._forward_(memory)
        params = self.weights["host", "params"]
        head = head_of(self.nets.shape, params, inputs.labels, inputs.counter, features)
        head_evaluate_kernel[features.shape[:2]](features, memory.answers, tuple(branches), head)
        sums = inputs.loss, inputs.correct, inputs.counted
        evaluation_sums_kernel[features.shape[0],](memory.answers, sums, tuple(branches), head)
        advance_kernel[1,](inputs.counter)

    def _forward_(self, memory: _Memory) -> tuple[Tensor, Branches]:
        """Features behind the last block, and their rows."""
        host, room, levels = self.weights["host"], iter(memory.features), iter(self.inputs.levels)
        x, branches = memory.images, Branches(1, memory.one)
        for plan in self.plans.blocks:
            weights = blocks.weights_of(plan, host["params"], host["statistics"])
            features = next(room)
            blocks.evaluate_(plan, x, weights, features, branches)
            x = features
            for number, side, pooled in plan.places:
                target, level = next(room), next(levels)
                self._slot_(memory, (number, side, pooled), (x, target), (branches.rows, level.rows, *level))
                x, branches = target, Branches(level.rows, level.counts)
        return x, branches

    def _slot_(
        self, memory: _Memory, place: tuple[int, int, bool], features: tuple[Tensor, Tensor],
        tree: tuple[int, int, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """The features before a slot and room for those behind it; place: slot, side and whether a pool follows."""
        number, side, pooled = place
        rows = self.weights["seeds", self.nets.shape.slots[number].name, "params"]
        seeds = Seeds(self.inputs.roster, self.inputs.alpha)
        slot = slots.slot_of(self.plans.slots[number], seeds, rows, memory.places[number], (side, side), pooled)
        slots.branch_(slot, *features, memory.spares[number], tree)


class _Builder:
    """Makes the memory of a step."""

    def __init__(self, step: ValidationStep) -> None:
        self.step, self.inputs = step, step.inputs
        self.num_nets = step.inputs.roster.shape[0]

    def memory(self) -> _Memory:
        step, batch = self.step, self.step.batch
        images = torch.empty(
            self.inputs.first.shape[0], batch, IMAGE_SIZE**2, COLOURS,
            dtype=activation_kind(step.nets), device=self.inputs.first.device,
        )  # fmt: skip
        features, rows, levels = list[Tensor](), 1, iter(self.inputs.levels)
        for plan in step.plans.blocks:
            features.append(self._room(images, rows, plan.norm_side, plan.outputs))
            for _, side, pooled in plan.places:
                rows = next(levels).rows
                features.append(self._room(images, rows, side // 2 if pooled else side, plan.outputs))
        places, spares = dict[int, WorkPlaces](), dict[int, Tensor]()
        for plan in step.plans.blocks:
            for number, side, _ in plan.places:
                size, count = (side, side), slots.num_programs(images.device)
                places[number] = slots.work_places(step.plans.slots[number], count, size, images, False)
                spares[number] = images.new_empty(count, side**2, plan.outputs)
        answers = answers_of(step.nets.shape, self.num_nets * rows, batch, images)
        numbers = range(len(step.plans.slots))
        one = torch.ones(self.num_nets, dtype=torch.int32, device=images.device)
        return _Memory(images, features, [places[n] for n in numbers], [spares[n] for n in numbers], answers, one)

    def _room(self, like: Tensor, rows: int, side: int, channels: int) -> Tensor:
        return like.new_empty(self.num_nets * rows, self.step.batch, side**2, channels)


def fresh_sums(num_nets: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(counter, loss, correct, counted) of a pass that begins; rows: R."""
    counts = torch.zeros(num_nets, rows + 1, dtype=torch.int64, device=device)
    loss = torch.zeros(num_nets, dtype=STATE_FLOAT, device=device)
    return torch.zeros(1, dtype=torch.int32, device=device), loss, counts[:, 1:].contiguous(), counts[:, 0].contiguous()


def num_batches(images: int, batch: int) -> int:
    """Batches that hold all images; the last may be filled up."""
    return triton.cdiv(images, batch)
