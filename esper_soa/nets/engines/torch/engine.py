"""The engine in torch: what a network means, on any device, with the layers that it is given.

Every other engine is tested against it with plain layers.
"""

from dataclasses import dataclass

from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engine import EngineChoice
from esper_soa.nets.engines.torch.training import TrainingPass
from esper_soa.nets.engines.torch.validation import ValidationPass
from esper_soa.nets.model.layers import PLAIN, Layers
from esper_soa.nets.passes import Measure, Pass, PieceEngine, TrainChunk
from esper_soa.nets.sgd import LearningRates


@dataclass(frozen=True)
class TorchEngine(PieceEngine):
    """A backward pass for all networks of a chunk; subset rows along the batch of a validation."""

    chosen: EngineChoice = EngineChoice(False, "plain torch")
    layers: Layers = PLAIN

    def trainer(
        self, shared: Pass[TrainingFeed], num_batches: int, lr: LearningRates
    ) -> TrainChunk:
        return TrainingPass(self.layers, *shared, num_batches, lr).train_chunk_

    def validator(self, shared: Pass[ValidationFeed]) -> Measure:
        return ValidationPass(self.layers, *shared).measure
