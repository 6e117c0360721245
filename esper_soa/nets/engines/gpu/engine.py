"""The engine of a GPU: kernels for N networks that read on the device what each has grown.

The work of a batch is a fixed list of launches, so one CUDA graph serves for a whole run. Imports
Triton: support.py loads it where the kernels can run.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import tree_leaves

from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.data.images import crops_of
from esper_soa.nets.engine import EngineChoice, TrainReport, ValidationReport
from esper_soa.nets.engines.gpu import slot_flags, training, tree, validation
from esper_soa.nets.engines.gpu.kernels import newborn
from esper_soa.nets.engines.gpu.kernels.images import crops_record
from esper_soa.nets.engines.gpu.kernels.newborn import SeedInit
from esper_soa.nets.engines.gpu.kernels.update import rule_numbers
from esper_soa.nets.engines.gpu.slots import num_programs
from esper_soa.nets.engines.gpu.step import Plans, pass_inputs, plans_of
from esper_soa.nets.engines.gpu.support import MAX_BATCH_IMAGES
from esper_soa.nets.engines.gpu.training import TrainStep, TrainSums
from esper_soa.nets.engines.gpu.validation import MemorySizes, ValidationStep, ValidationSums
from esper_soa.nets.graphs import StepCache, captured_call
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.needs import Need
from esper_soa.nets.seeds.pools import SlotSeeds, allocate
from esper_soa.nets.seeds.subsets import max_rows
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules, rules_of
from esper_soa.state import STATE_FLOAT, GradientStats, initial
from esper_soa.vocabulary import Stage

META_DEVICE = torch.device("meta")


class ResidentSeeds(NamedTuple):
    """Seeds of N networks with S slots in an env-step, on the device."""

    training: Tensor  # int32 [N, S], see slot_flags.py
    validation: Tensor  # int32 [N, S]
    codes: Tensor  # int64 [N, R], subset rows, -1 = none
    levels: list[tree.TreeLevel]  # of the subset rows, by slot in execution order
    ablated: Tensor  # bool [N, S]


@dataclass(frozen=True)
class GpuEngine:
    """Trains and validates hosts for which support.py finds no obstacle."""

    steps: StepCache = field(default_factory=lambda: StepCache(capture=False))
    chosen: EngineChoice = EngineChoice(False, "Triton kernels for whole networks")
    plans: dict[tuple[HostShape, torch.device], Plans] = field(default_factory=dict)
    seed_inits: dict[tuple[int, ...], tuple[SeedInit, ...]] = field(default_factory=dict)

    def needs(self, setup: Setup) -> list[Need]:
        """Needs of both steps with their arrays, as they are on a device without values."""
        plans = self._plans(setup.shape, META_DEVICE)
        num_slots = len(setup.shape.slots)
        rows = tree.level_rows(num_slots, max_rows(num_slots, setup.rows))
        weights = allocate(setup.shape, setup.num_envs, META_DEVICE, dtype=torch.float32)
        batch = _eval_batch(setup, setup.val_samples)
        extent = MemorySizes(
            setup.num_envs,
            1,
            batch,
            images=-(-setup.val_samples // batch) * batch,
            rows=rows,
            programs=num_programs(setup.device),
        )
        arrays = (
            training.memory_of(setup, plans, weights, batch=setup.batch_size),
            validation.memory_of(setup, plans, extent, device=META_DEVICE),
        )
        counted = _storages([rows for pool in _pools(weights) for rows in pool.values()])
        size = sum(size for place, size in _storages(arrays).items() if place not in counted)
        return [Need(f"the steps of {self.chosen.name}", size, ("envs", "batch_size"))]

    def claim_(
        self, setup: Setup, weights: TensorDict, seeds: SlotSeeds, keys: Tensor
    ) -> ResidentSeeds:
        """Where the env state lies: nothing is read by the host, whether seeds are born or not."""
        place = _places(weights, keys)[1:]
        if place not in self.seed_inits:
            self.seed_inits[place] = newborn.seed_inits(weights, setup.shape)
        name = "claim", setup.detached_stages, setup.rows, place
        return captured_call(
            self.steps, name, partial(_claimed_, setup, self.seed_inits[place]), seeds, keys
        )

    def train_(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ResidentSeeds,
        feed: TrainingFeed,
        num_batches: int,
        rules: Rules | None = None,
    ) -> TrainReport:
        """All networks at once, a fixed list of launches per batch."""
        device = alpha.device
        num_nets = alpha.shape[0]
        envs = torch.arange(num_nets, device=device)
        crops = crops_of(feed)(envs, 0, num_batches)
        images = crops.first.shape[1]
        inputs = pass_inputs(crops, active_seeds.training, alpha)
        sums = TrainSums(
            rule_numbers(rules or rules_of(setup.task), num_nets, device),
            torch.zeros(num_nets, device=device),
            torch.zeros(num_nets, dtype=torch.int64, device=device),
            gradients=dict(initial(GradientStats, alpha.shape, device).items()),
        )
        plans = self._plans(setup.shape, device)
        cut = crops_record(crops.bank, inputs.first)
        fresh = TrainStep(
            setup,
            plans,
            weights,
            given=inputs,
            sums=sums,
            crops=cut,
            batch=images // num_batches,
        )
        stride = setup.task.gradient_stride
        key = "train", images, num_batches, *_places(weights, crops.bank.lines)
        steps = range(num_batches // setup.accumulate)
        done = self.steps.run_(key, fresh, [int(index % stride == 0) for index in steps]).sums
        gradients = {name: values.clone() for name, values in done.gradients.items()}
        return TrainReport(
            (done.loss / num_batches).to(STATE_FLOAT),
            100.0 * done.correct.to(STATE_FLOAT) / images,
            GradientStats.from_dict(gradients, batch_size=list(alpha.shape)),
        )

    def validate(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ResidentSeeds,
        feed: ValidationFeed,
        answers: Tensor | None = None,
    ) -> ValidationReport:
        """All networks and subset rows at once."""
        device = alpha.device
        num_nets = alpha.shape[0]
        codes = active_seeds.codes
        crops = crops_of(feed)(torch.arange(num_nets, device=device))
        images = crops.first.shape[1]
        batch = _eval_batch(setup, images)
        padding = 0, -images % batch  # the last batch is filled up
        labels = F.pad(crops.labels, padding, value=-1)
        crops = crops._replace(first=F.pad(crops.first, padding), labels=labels)
        inputs = pass_inputs(crops, active_seeds.validation, alpha)
        sums = ValidationSums(
            (codes[:, 0] >= 0).int(),
            active_seeds.levels,
            torch.zeros(num_nets, dtype=STATE_FLOAT, device=device),
            correct=torch.zeros(codes.shape, dtype=torch.int64, device=device),
            counted=torch.zeros(num_nets, dtype=torch.int64, device=device),
        )
        plans = self._plans(setup.shape, device)
        cut = crops_record(crops.bank, inputs.first)
        fresh = ValidationStep(
            setup, plans, weights, given=inputs, sums=sums, crops=cut, batch=batch
        )
        key = "validate", *inputs.first.shape, batch, *_places(weights, crops.bank.lines)
        count = inputs.first.shape[1] // batch
        step = self.steps.run_(key, fresh, [0] * count)
        if answers is not None and step.memory is not None:
            answers.copy_(step.memory.right[:, :images])
        done = step.sums
        counted = done.counted.clamp(min=1)  # none of a network that has ended
        accuracy = 100.0 * done.correct.to(STATE_FLOAT) / counted[:, None]
        accuracy = torch.where(codes >= 0, accuracy, 0.0)
        return ValidationReport(done.loss / counted, accuracy, codes, ablated=active_seeds.ablated)

    def _plans(self, shape: HostShape, device: torch.device) -> Plans:
        if (shape, device) not in self.plans:
            self.plans[shape, device] = plans_of(shape, device)
        return self.plans[shape, device]


def _claimed_(
    setup: Setup, seed_inits: tuple[SeedInit, ...], seeds: SlotSeeds, keys: Tensor
) -> ResidentSeeds:
    newborn.begin_(seed_inits, seeds, keys)
    training = slot_flags.training_flags(seeds, setup.detached_stages)
    validation = slot_flags.validation_flags(seeds, setup.detached_stages)
    fossils = seeds.ablated & (seeds.stage == Stage.FOSSILIZED)
    codes = tree.codes_of(seeds.ablated, fossils, setup.rows)
    if seeds.over is not None:
        codes = torch.where(seeds.over[:, :1], -1, codes)
    levels = tree.levels_of(codes, setup.shape.execution_order)
    return ResidentSeeds(training, validation, codes, levels=levels, ablated=seeds.ablated)


def _eval_batch(setup: Setup, images: int) -> int:
    return min(setup.eval_batch, images, MAX_BATCH_IMAGES)


def _places(weights: TensorDict, lines: Tensor) -> tuple[int, ...]:
    """Where all lies that a step reads or changes in place: a step for other memory is another."""
    places = (rows.data_ptr() for pool in _pools(weights) for rows in pool.values())
    return lines.data_ptr(), *places


def _pools(weights: TensorDict) -> list[TensorDict]:
    return [weights["host"], *weights["seeds"].values()]


def _storages(tree: object) -> dict[int, int]:
    """Bytes of all memory in nested tensors, each once."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}
