"""A training batch of N networks as one fixed list of launches on memory that stays, the same for
any mixture of seeds.

Nothing about the seeds is known here but their tables; the kernels read the rest where it lies. The
step is a graphs.StaticStep with one key for a whole run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.engine import NetsConfig
from esper_soa.nets.engines.gpu import blocks, slots, update
from esper_soa.nets.engines.gpu.blocks import COLOURS, BlockMemory, BlockPlan
from esper_soa.nets.engines.gpu.classifier import answers_of, head_of
from esper_soa.nets.engines.gpu.images import cut_
from esper_soa.nets.engines.gpu.kernels.head import Answers, head_kernel, head_sums_kernel
from esper_soa.nets.engines.gpu.kernels.images import Crops
from esper_soa.nets.engines.gpu.kernels.update import Pool
from esper_soa.nets.engines.gpu.slots import Seeds, SlotTable, WorkPlaces


class TrainInputs(NamedTuple):
    """What tells one env-step from another, and what it gives; memory of its own."""

    first: Tensor  # int64 [N, T]: bytes of the bank at which images begin
    labels: Tensor  # int64 [N, T]
    roster: Tensor  # int32 [N, S], see roster.py
    alpha: Tensor  # float32 [N, S]
    rates: Tensor  # float32 [2], of hosts and seeds
    counter: Tensor  # int32 [1], batches so far
    loss: Tensor  # float32 [N], sum over batches
    correct: Tensor  # int64 [N]
    gradients: dict[str, Tensor]  # [N, S], flags as uint8


class Plans(NamedTuple):
    """Tables of a run's hosts, made once."""

    blocks: list[BlockPlan]
    slots: list[SlotTable]
    tensors: list[update.TensorTable]


class Memory(NamedTuple):
    """All that a batch needs."""

    images: Tensor  # [N, B, 1024, COLOURS]
    blocks: list[BlockMemory]
    pooled: list[Tensor]  # by block: features behind a slot's pool, else those of the block
    pooled_codes: list[Tensor]
    places: list[WorkPlaces]  # by slot
    gradients: list[Tensor]  # by block, of its features
    pooled_gradients: list[Tensor]
    partials: list[Tensor]  # of the hosts, then by slot
    pools: tuple[Pool, ...]
    answers: Answers


@dataclass(eq=False)
class TrainStep:
    """The optimiser steps of an env-step, one after the other."""

    nets: NetsConfig
    plans: Plans
    weights: TensorDict
    inputs: TrainInputs
    crops: Crops  # of the bank; its `first` is that of the inputs
    batch: int  # images of each network
    memory: Memory | None = None

    def buffers(self) -> list[Tensor]:
        """What differs from one env-step to the next."""
        return [*self.inputs[:-1], *self.inputs.gradients.values()]

    def step_(self, variant: int) -> None:
        """The batches of one optimiser step; with variant 1 gradient statistics are taken."""
        if self.memory is None:
            self.memory = memory_of(self.nets, self.plans, self.weights, self.batch)
        memory = self.memory
        inputs = self.inputs
        count = self.nets.accumulate
        for number in range(count):
            if number:
                inputs.counter.add_(1)  # as the step below does behind its last batch
            cut_(self.crops, inputs.counter, memory.images)
            self._head_(memory, self._forward_(memory))
            self._backward_(memory)
            update.sum_(
                memory.pools,
                inputs.roster,
                kept=number > 0,
                share=1 / count if number == count - 1 else 1.0,
            )
        if variant == 1:
            measures = update.measures_of(inputs.gradients, self.nets.shape)
            update.measure_(memory.pools, self.plans.tensors, inputs.roster, measures)
        update.step_(
            memory.pools,
            inputs.roster,
            update.rules_of(self.nets.task, inputs.rates),
            inputs.counter,
        )

    def _slot(self, memory: Memory, number: int, side: int, pooled: bool) -> slots.Slot:
        rows = self.weights["seeds", self.nets.shape.slots[number].name, "params"]
        seeds = Seeds(self.inputs.roster, self.inputs.alpha)
        return slots.slot_of(
            self.plans.slots[number], seeds, rows, memory.places[number], (side, side), pooled
        )

    def _forward_(self, memory: Memory) -> Tensor:
        """Features behind the last block."""
        x = memory.images
        host = self.weights["host"]
        for plan in self.plans.blocks:
            weights = blocks.weights_of(plan, host["params"], host["statistics"])
            blocks.forward_(plan, x, weights, memory.blocks[plan.number])
            features = memory.blocks[plan.number].features
            x = memory.pooled[plan.number]
            for number, side, pooled in plan.places:
                given = features if number == plan.before else x
                slots.forward_(
                    self._slot(memory, number, side, pooled),
                    given,
                    x,
                    memory.pooled_codes[plan.number],
                )
        return x

    def _head_(self, memory: Memory, features: Tensor) -> None:
        """Loss and right answers, gradients of the classifier and of the last features."""
        inputs = self.inputs
        gradient = memory.pooled_gradients[-1]
        head = head_of(
            self.nets.shape, self.weights["host", "params"], inputs.labels, inputs.counter, features
        )
        answers = memory.answers
        partials = memory.partials[0]
        head_kernel[features.shape[:2]](features, gradient, answers, head)
        width = partials.shape[2]
        at = head.weight.base.storage_offset()
        sums = (inputs.loss, inputs.correct)
        grid = partials.shape[:2]
        head_sums_kernel[grid](answers, partials[:, :, at:], width, sums, head)

    def _backward_(self, memory: Memory) -> None:
        host = self.weights["host"]
        records = dict[int, slots.Slot]()
        for plan in reversed(self.plans.blocks):
            own = memory.blocks[plan.number]
            number = plan.number
            behind = memory.pooled_gradients[number]
            codes = memory.pooled_codes[number]
            for slot, side, pooled in reversed(plan.places):
                given = memory.gradients[number] if slot == plan.before else behind
                records[slot] = self._slot(memory, slot, side, pooled)
                slots.backward_(records[slot], given, behind, codes)
            x = memory.pooled[number - 1] if number else memory.images
            weights = blocks.weights_of(plan, host["params"], host["statistics"])
            room = memory.pooled_gradients[number - 1] if number else None
            blocks.backward_(
                plan, x, weights, own, (memory.gradients[number], room), memory.partials[0]
            )
        if records:
            partials = tuple(memory.partials[1 + slot] for slot in records)
            slots.weights_(tuple(records.values()), partials, self.batch)


def activation_kind(nets: NetsConfig) -> torch.dtype:
    """The format of activations."""
    return nets.precision if nets.precision == torch.bfloat16 else torch.float32


def memory_of(nets: NetsConfig, plans: Plans, weights: TensorDict, batch: int) -> Memory:
    """Memory for batches of B images; of partial sums every column is 0 at first."""
    shape = nets.shape
    params = weights["host", "params"]
    num_nets = params.shape[0]
    images = params.new_empty(num_nets, batch, IMAGE_SIZE**2, COLOURS, dtype=activation_kind(nets))
    own = [blocks.memory_of(plan, num_nets, batch, images) for plan in plans.blocks]
    pooled = list[Tensor]()
    codes = list[Tensor]()
    for plan, memory in zip(plans.blocks, own, strict=True):
        size = num_nets, batch, plan.out_side**2, plan.outputs
        pooled.append(images.new_empty(size) if plan.slot_pool else memory.features)
        codes.append(images.new_empty(size, dtype=torch.uint8) if plan.slot_pool else memory.codes)
    gradients = [torch.empty_like(memory.features) for memory in own]
    behind = [
        torch.empty_like(features) if plan.slot_pool else gradient
        for plan, features, gradient in zip(plans.blocks, pooled, gradients, strict=True)
    ]
    places = [_place(plans, number, num_nets * batch, images) for number in range(len(plans.slots))]
    seeds = [weights["seeds", spec.name, "params"] for spec in shape.slots]
    partials = [params.new_zeros(num_nets, blocks.num_splits(batch, shape), params.shape[1])]
    partials += [rows.new_zeros(num_nets, slots.num_splits(batch), rows.shape[1]) for rows in seeds]
    pools = update.pools_of(weights, shape, plans.slots, partials)
    answers = answers_of(shape, num_nets, batch, images)
    return Memory(images, own, pooled, codes, places, gradients, behind, partials, pools, answers)


def _place(plans: Plans, number: int, places: int, like: Tensor) -> WorkPlaces:
    """Work places of a slot."""
    (side,) = [side for plan in plans.blocks for slot, side, _ in plan.places if slot == number]
    return slots.work_places(plans.slots[number], places, (side, side), like, True)
