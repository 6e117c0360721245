"""The engine in torch: what a network means, on any device.

Every other engine is tested against it.
"""

from dataclasses import dataclass
from functools import partial

from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engine import EngineChoice
from esper_soa.nets.engines.torch.training import train_chunk_
from esper_soa.nets.engines.torch.validation import measure
from esper_soa.nets.passes import Measure, Pass, PieceEngine, TrainChunk
from esper_soa.nets.sgd import Rules


@dataclass(frozen=True)
class TorchEngine(PieceEngine):
    """A backward pass for all networks of a chunk; subset rows along the batch of a validation."""

    chosen: EngineChoice = EngineChoice(False, "plain torch")

    def trainer(self, shared: Pass[TrainingFeed], num_batches: int, rules: Rules) -> TrainChunk:
        return partial(train_chunk_, shared, num_batches, rules)

    def validator(self, shared: Pass[ValidationFeed]) -> Measure:
        return partial(measure, shared)
