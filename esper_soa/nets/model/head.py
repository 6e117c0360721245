"""The head of the package's hosts: the mean of all positions, then a linear classifier."""

from dataclasses import dataclass

from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.model.parts import SPREAD, LayerSpec, Parameter
from esper_soa.nets.model.segments import FeatureShape, Forward, PlainPart, StatelessSegment

MEAN_LINEAR = "mean_linear"


@dataclass(frozen=True)
class MeanLinear(StatelessSegment):
    """Logits [B, n, classes] of features [B, n*C, ...]: mean over all axes behind C, linear."""

    input_shape: FeatureShape
    classes: int

    kind = MEAN_LINEAR
    slots = ()
    slot_shapes = ()
    activations = 0  # too few to count

    @property
    def output_shape(self) -> FeatureShape:
        return (self.classes,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Weight and bias."""
        channels = self.input_shape[0]
        shapes = (self.classes, channels), (self.classes,)
        return tuple(SPREAD.tensor(shape, channels) for shape in shapes)

    @property
    def products(self) -> int:
        return self.classes * self.input_shape[0]

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        return batched.classify(x, *folded)

    def plain_parts(self) -> list[PlainPart]:
        sizes = {"in_features": self.input_shape[0], "out_features": self.classes}
        layers = [
            LayerSpec("mean", "AdaptiveAvgPool2d", {"output_size": 1}),
            LayerSpec("flatten", "Flatten", {}),
            LayerSpec("linear", "Linear", dict(sizes)),
        ]
        return [PlainPart("classifier", layers if len(self.input_shape) > 1 else layers[2:])]
