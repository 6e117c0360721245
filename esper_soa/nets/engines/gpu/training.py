"""A training batch of N networks as a fixed list of launches on memory that stays, the same for any
mixture of seeds: nothing about them is known here but their tables.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.nets import IMAGE_SIZE
from esper_soa.nets.engines.gpu import blocks, slots
from esper_soa.nets.engines.gpu.blocks import COLOURS, BlockMemory
from esper_soa.nets.engines.gpu.kernels import update
from esper_soa.nets.engines.gpu.kernels.head import HeadOutputs, head_kernel, head_sums_kernel
from esper_soa.nets.engines.gpu.kernels.images import cut_
from esper_soa.nets.engines.gpu.kernels.seed import KernelSlot
from esper_soa.nets.engines.gpu.kernels.update import Pool
from esper_soa.nets.engines.gpu.slots import SlotWorkspace
from esper_soa.nets.engines.gpu.step import PassStep, Plans, head_outputs
from esper_soa.nets.setup import Setup


class TrainSums(NamedTuple):
    """How rows move in an env-step, and what it gives; memory of its own."""

    rules: Tensor  # float32 [N, 2, 4], see update.rule_numbers
    loss: Tensor  # float32 [N], sum over batches
    correct: Tensor  # int64 [N]
    gradients: dict[str, Tensor]  # [N, S]


class TrainMemory(NamedTuple):
    """All that a batch needs."""

    images: Tensor  # [N, B, 1024, COLOURS]
    blocks: list[BlockMemory]
    pooled: list[Tensor]  # by block: features behind a slot's pool, else those of the block
    pooled_codes: list[Tensor]
    places: list[SlotWorkspace]  # by slot
    gradients: list[Tensor]  # by block, of its features
    pooled_gradients: list[Tensor]
    partials: list[Tensor]  # of the hosts, then by slot
    pools: tuple[Pool, ...]
    answers: HeadOutputs


@dataclass(eq=False)
class TrainStep(PassStep):
    """The optimiser steps of an env-step, one after the other."""

    sums: TrainSums
    memory: TrainMemory | None = None

    def step_(self, variant: int) -> None:
        """The batches of one optimiser step; with variant 1 gradient statistics are taken."""
        if self.memory is None:
            self.memory = memory_of(self.setup, self.plans, self.weights, batch=self.batch)
        memory = self.memory
        slot_flags = self.given.slot_flags
        counter = self.given.counter
        count = self.setup.accumulate
        for number in range(count):
            if number:
                counter.add_(1)  # as the step below does behind its last batch
            cut_(self.crops, counter, memory.images)
            self._head_(memory, self._forward_(memory))
            self._backward_(memory)
            share = 1 / count if number == count - 1 else 1.0
            update.sum_(memory.pools, slot_flags, accumulate=number > 0, share=share)
        if variant == 1:
            measures = update.measures_of(self.sums.gradients, self.setup.shape)
            update.measure_(memory.pools, self.plans.tensors, slot_flags, measures=measures)
        update.step_(memory.pools, slot_flags, self.sums.rules, counter=counter)

    def _forward_(self, memory: TrainMemory) -> Tensor:
        x = memory.images
        for plan in self.plans.blocks:
            block = memory.blocks[plan.number]
            blocks.forward_(
                plan, x, self.block_weights(plan), memory=block, slot_flags=self.given.slot_flags
            )
            x = memory.pooled[plan.number]
            codes = memory.pooled_codes[plan.number]
            for place in plan.places:
                inputs = block.features if place[0] == plan.before else x
                slots.forward_(self.slot(place, memory.places[place[0]]), inputs, x, codes=codes)
        return x

    def _head_(self, memory: TrainMemory, features: Tensor) -> None:
        head = self.head(features)
        gradient = memory.pooled_gradients[-1]
        head_kernel[features.shape[:2]](features, gradient, memory.answers, head)
        partials = memory.partials[0]
        num_nets, splits, width = partials.shape
        columns = partials[:, :, head.weight.base.storage_offset() :]
        sums = self.sums.loss, self.sums.correct
        head_sums_kernel[num_nets, splits](memory.answers, columns, width, sums, head)

    def _backward_(self, memory: TrainMemory) -> None:
        records = dict[int, KernelSlot]()
        for plan in reversed(self.plans.blocks):
            number = plan.number
            pooled_gradient = memory.pooled_gradients[number]
            codes = memory.pooled_codes[number]
            for place in reversed(plan.places):
                early = place[0] == plan.before
                behind = memory.gradients[number] if early else pooled_gradient
                records[place[0]] = self.slot(place, memory.places[place[0]])
                slots.backward_(records[place[0]], behind, pooled_gradient, codes=codes)
            x = memory.pooled[number - 1] if number else memory.images
            room = memory.pooled_gradients[number - 1] if number else None
            blocks.backward_(
                plan,
                x,
                self.block_weights(plan),
                memory=memory.blocks[number],
                gradients=(memory.gradients[number], room),
                partials=memory.partials[0],
                slot_flags=self.given.slot_flags,
            )
        if records:
            partials = tuple(memory.partials[1 + slot] for slot in records)
            slots.weights_(tuple(records.values()), partials, self.batch)


def memory_of(setup: Setup, plans: Plans, weights: TensorDict, batch: int) -> TrainMemory:
    """Memory for batches of B images; of partial sums every column is 0 at first."""
    shape = setup.shape
    params = weights["host", "params"]
    num_nets = params.shape[0]
    images = params.new_empty(num_nets, batch, IMAGE_SIZE**2, COLOURS, dtype=setup.precision)
    block_memory = [blocks.memory_of(plan, num_nets, batch, like=images) for plan in plans.blocks]
    pooled = list[Tensor]()
    codes = list[Tensor]()
    for plan, memory in zip(plans.blocks, block_memory, strict=True):
        size = num_nets, batch, plan.out_side**2, plan.outputs
        pooled.append(images.new_empty(size) if plan.slot_pool else memory.features)
        codes.append(images.new_empty(size, dtype=torch.uint8) if plan.slot_pool else memory.codes)
    gradients = [torch.empty_like(memory.features) for memory in block_memory]
    pooled_gradients = [
        torch.empty_like(features) if plan.slot_pool else gradient
        for plan, features, gradient in zip(plans.blocks, pooled, gradients, strict=True)
    ]
    sides = {slot: side for plan in plans.blocks for slot, side, _ in plan.places}
    places = [
        slots.slot_workspace(
            table, num_nets * batch, (sides[table.number],) * 2, like=images, gradients=True
        )
        for table in plans.slots
    ]
    seeds = [weights["seeds", spec.name, "params"] for spec in shape.slots]
    partials = [params.new_zeros(num_nets, blocks.num_splits(batch, shape), params.shape[1])]
    partials += [rows.new_zeros(num_nets, slots.num_splits(batch), rows.shape[1]) for rows in seeds]
    pools = update.pools_of(weights, shape, plans.slots, partials=partials)
    answers = head_outputs(shape, num_nets, batch, like=images)
    return TrainMemory(
        images,
        block_memory,
        pooled,
        pooled_codes=codes,
        places=places,
        gradients=gradients,
        pooled_gradients=pooled_gradients,
        partials=partials,
        pools=pools,
        answers=answers,
    )
