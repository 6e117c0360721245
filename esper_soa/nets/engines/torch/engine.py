"""The engine in torch: what a network means, on any device, with the layers that it is given.

Every other engine is tested against it with plain layers.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.engine import (
    Choice,
    NetsConfig,
    TrainingFeed,
    TrainReport,
    ValidationFeed,
    ValidationReport,
    WorkSizes,
)
from esper_soa.nets.engines.torch.training import TrainingPass
from esper_soa.nets.engines.torch.validation import ValidationPass
from esper_soa.nets.layers import PLAIN, Layers
from esper_soa.nets.passes import train_pass_, validation_pass
from esper_soa.nets.pools import ActiveSeeds, SlotSeeds, read_and_claim_
from esper_soa.nets.seed_plan import training_plan, validation_plan
from esper_soa.nets.sgd import LearningRates


@dataclass(frozen=True)
class TorchEngine:
    """See nets/engine.py for what it does."""

    layers: Layers = PLAIN
    chosen: Choice = Choice(False, "plain torch")

    def kept_bytes(self, nets: NetsConfig, work: WorkSizes, device: torch.device) -> int:
        """None."""
        return 0

    def claim_(
        self, nets: NetsConfig, weights: TensorDict, seeds: SlotSeeds, keys: Tensor
    ) -> ActiveSeeds:
        """On the host, as only seeds that run cost time."""
        return read_and_claim_(weights, nets.shape, seeds, keys)

    def train_(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: TrainingFeed,
        num_batches: int,
        lr_factor: float = 1.0,
    ) -> TrainReport:
        """Chunk by chunk, a backward pass for all networks of a chunk."""
        plan = training_plan(active_seeds, nets.detached_stages)
        lr = LearningRates.of(nets.task, lr_factor)
        job = TrainingPass(self.layers, nets, weights, alpha, plan, feed, num_batches, lr)
        return train_pass_(nets, alpha, active_seeds, job.train_chunk_)

    def validate(
        self,
        nets: NetsConfig,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationFeed,
    ) -> ValidationReport:
        """Job by job, the subset rows along the batch."""
        plan = validation_plan(active_seeds, nets.detached_stages)
        job = ValidationPass(self.layers, nets, weights, alpha, plan, feed)
        return validation_pass(nets, alpha, active_seeds, job.measure)
