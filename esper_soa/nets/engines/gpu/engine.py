"""The engine of a GPU: training and validation of N networks by kernels that read on the device what each has grown.

The work of a batch is a fixed list of launches, so one CUDA graph serves for a whole run. Imports Triton: support.py
loads it where the kernels can run.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.data import ImageCutter, cut_images
from esper_soa.nets.engine import Choice, NetsConfig, TrainingFeed, TrainReport, ValidationFeed, ValidationReport
from esper_soa.nets.engines.gpu import blocks, newborn, roster, tree, update
from esper_soa.nets.engines.gpu.images import all_crops, crops_of
from esper_soa.nets.engines.gpu.kernels.newborn import Nursery
from esper_soa.nets.engines.gpu.slots import slot_table
from esper_soa.nets.engines.gpu.training import Plans, TrainInputs, TrainStep
from esper_soa.nets.engines.gpu.validation import ValidationInputs, ValidationStep, fresh_sums, num_batches
from esper_soa.nets.gradients import unmeasured
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.host import HostShape
from esper_soa.nets.pools import ActiveSeeds, upload
from esper_soa.nets.seed_plan import training_plan, validation_plan
from esper_soa.nets.sgd import LearningRates
from esper_soa.state import STATE_FLOAT, GradientStats, Ramp, Slots

MOST_IMAGES = 4096  # of a validation batch: a grid has at most 65,535 tiles


class ResidentSeeds(NamedTuple):
    """What a pass of N networks with S slots has to know of their seeds, on the device; see `GpuEngine.claim_`."""

    training: Tensor  # int32 [N, S], see roster.py
    validation: Tensor  # int32 [N, S]
    codes: Tensor  # int64 [N, R], subset rows, -1 = none
    ablated: Tensor  # bool [N, S]


@dataclass(frozen=True)
class GpuEngine:
    """See nets/engine.py for what it does; for hosts without an obstacle (support.py)."""

    steps: StepCache = field(default_factory=lambda: StepCache(capture=False))
    chosen: Choice = Choice(False, "Triton kernels for whole networks")
    cut: ImageCutter = cut_images
    plans: dict[tuple[HostShape, torch.device], Plans] = field(default_factory=dict)
    nurseries: dict[tuple[int, ...], tuple[Nursery, ...]] = field(default_factory=dict)

    def claim_(
        self, nets: NetsConfig, weights: TensorDict, slots: Slots, ramp: Ramp, ablate_fossils: bool, keys: Tensor
    ) -> ResidentSeeds:
        """What read_active_seeds and pools.claim_ do, without a read by the host; for both passes of an env-step.

        keys: int64 [N], streams of this env-step.
        """
        place = _places(weights, keys)[1:]
        if place not in self.nurseries:
            self.nurseries[place] = newborn.nurseries_of(weights, nets.shape)
        newborn.begin_(self.nurseries[place], slots, keys)
        training = roster.training_roster(slots, ramp, nets.detached_stages)
        validation = roster.validation_roster(slots, ramp, nets.detached_stages, ablate_fossils)
        ablated = (validation & roster.ABLATED) > 0
        codes = tree.resident_codes(ablated, (validation & roster.FOSSIL) > 0, nets.rows)
        return ResidentSeeds(training, validation, codes, ablated)

    def train_(
        self, nets: NetsConfig, weights: TensorDict, alpha: Tensor, active_seeds: ActiveSeeds | ResidentSeeds,
        feed: TrainingFeed, num_batches: int, lr_factor: float = 1.0,
    ) -> TrainReport:  # fmt: skip
        """All networks at once, a fixed list of launches per batch."""
        device, size = alpha.device, alpha.shape
        crops = all_crops(feed, torch.arange(size[0], device=device), num_batches)
        rates, images = LearningRates.of(nets.task, lr_factor), crops.first.shape[1]
        flags = {name: values.to(_kept(values)) for name, values in unmeasured(size, device).items()}
        inputs = TrainInputs(
            crops.first.contiguous(), crops.labels.contiguous(), _resident(nets, active_seeds, device).training,
            alpha.float().contiguous(),
            torch.tensor([float(rate) for rate in rates]).to(device, non_blocking=True),
            torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(size[0], device=device),
            torch.zeros(size[0], dtype=torch.int64, device=device), flags,
        )  # fmt: skip
        fresh = TrainStep(
            nets, self._plans(nets.shape, device), weights, inputs, crops_of(crops.bank, inputs.first),
            images // num_batches,
        )  # fmt: skip
        stride = nets.task.gradient_stride
        key = "train", images, num_batches, *_places(weights, crops.bank.lines)
        steps = range(num_batches // nets.accumulate)
        done = self.steps.run_(key, fresh, [int(index % stride == 0) for index in steps]).inputs
        kinds = {name: values.dtype for name, values in unmeasured(size, device).items()}
        gradients = {name: values.to(kinds[name], copy=True) for name, values in done.gradients.items()}
        stats = GradientStats.from_dict(gradients, batch_size=list(size))
        return TrainReport(
            (done.loss / num_batches).to(STATE_FLOAT), 100.0 * done.correct.to(STATE_FLOAT) / images, stats
        )

    def validate(
        self, nets: NetsConfig, weights: TensorDict, alpha: Tensor, active_seeds: ActiveSeeds | ResidentSeeds,
        feed: ValidationFeed,
    ) -> ValidationReport:  # fmt: skip
        """All networks and subset rows at once."""
        device, num_nets = alpha.device, alpha.shape[0]
        crops = feed.crops(torch.arange(num_nets, device=device))
        batch = min(nets.eval_batch, crops.first.shape[1], MOST_IMAGES)
        count = num_batches(crops.first.shape[1], batch)
        missing = count * batch - crops.first.shape[1]
        seeds = _resident(nets, active_seeds, device)
        codes = seeds.codes
        inputs = ValidationInputs(
            F.pad(crops.first, (0, missing)).contiguous(), F.pad(crops.labels, (0, missing), value=-1).contiguous(),
            seeds.validation, alpha.float().contiguous(), tree.levels_of(codes, nets.shape.execution_order),
            *fresh_sums(num_nets, codes.shape[1], device),
        )  # fmt: skip
        fresh = ValidationStep(
            nets, self._plans(nets.shape, device), weights, inputs, crops_of(crops.bank, inputs.first), batch
        )
        key = "validate", *inputs.first.shape, batch, *_places(weights, crops.bank.lines)
        done = self.steps.run_(key, fresh, [0] * count).inputs
        accuracy = 100.0 * done.correct.to(STATE_FLOAT) / done.counted[:, None]
        accuracy = torch.where(codes >= 0, accuracy, 0.0)
        return ValidationReport(done.loss / done.counted, accuracy, codes, seeds.ablated)

    def _plans(self, shape: HostShape, device: torch.device) -> Plans:
        """Tables of a host, made once."""
        if (shape, device) not in self.plans:
            numbers = range(len(shape.slots))
            self.plans[shape, device] = Plans(
                blocks.block_plans(shape), [slot_table(shape, number, device) for number in numbers],
                [update.tensor_table(shape, number, device) for number in numbers],
            )  # fmt: skip
        return self.plans[shape, device]


def _resident(nets: NetsConfig, seeds: ActiveSeeds | ResidentSeeds, device: torch.device) -> ResidentSeeds:
    """The seeds on the device, uploaded where the host holds them."""
    if isinstance(seeds, ResidentSeeds):
        return seeds
    stages = nets.detached_stages
    return ResidentSeeds(
        roster.planned(training_plan(seeds, stages), device),
        roster.planned(validation_plan(seeds, stages), device, seeds.ablated),
        upload(tree.codes_of(seeds, nets.rows), device),
        upload(seeds.ablated, device),
    )


def _kept(values: Tensor) -> torch.dtype:
    """The format in which kernels write statistics."""
    return torch.uint8 if values.dtype == torch.bool else values.dtype


def _places(weights: TensorDict, lines: Tensor) -> tuple[int, ...]:
    """Where everything lies that a step reads or changes in place: a step for other memory is another step."""
    pools = [weights["host"], *weights["seeds"].values()]
    return lines.data_ptr(), *(rows.data_ptr() for pool in pools for rows in pool.values())
