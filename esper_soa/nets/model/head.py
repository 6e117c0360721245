"""Heads: losses of classifiers, and the package's: a linear classifier of the mean of positions."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.model import segments
from esper_soa.nets.model.parts import Arguments, LayerSpec, Parameter, linear_parameters
from esper_soa.nets.model.segments import Forward, Segment, Values

MEAN_LINEAR = "mean_linear"


class Classifier:
    """Part of a head with logits [B, n, classes] or [B, n, K, classes]: cross-entropy, argmax."""

    def loss_bytes(self, num_nets: int, batch: int) -> int:
        """0: too few to count."""
        return 0

    def train_loss(
        self: Segment, run: Forward, values: Values, x: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        return batched.loss(self.train(run, values, x).to(run.dtype), labels)

    def measure(
        self: Segment, run: Forward, folded: list[Tensor], x: Tensor, labels: Tensor, row: int
    ) -> tuple[Tensor, Tensor]:
        logits = self.infer(run, folded, x).to(run.dtype).unflatten(0, (-1, labels.shape[0]))
        logits, targets = batched.flatten_targets(logits, labels)
        right = (logits.argmax(-1) == targets).unflatten(1, (labels.shape[0], -1)).sum(2)
        main = logits[row].flatten(0, 1)
        losses = F.cross_entropy(main, targets.flatten(), ignore_index=-1, reduction="none")
        # One contiguous row per network: its sum is rounded alike, whoever is validated beside it.
        return losses.unflatten(0, targets.shape).T.contiguous().sum(1), right.transpose(1, 2)


@dataclass(frozen=True)
class MeanLinear(segments.StatelessSegment, Classifier):
    """Logits [B, n, classes] of features [B, n*C, ...]: mean over all axes behind C, linear."""

    input_shape: segments.FeatureShape
    classes: int

    kind = MEAN_LINEAR
    slots = ()
    slot_shapes = ()
    activations = 0  # too few to count

    @property
    def output_shape(self) -> segments.FeatureShape:
        return (self.classes,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Weight and bias."""
        return linear_parameters(self.input_shape[0], self.classes)

    @property
    def products(self) -> int:
        return self.classes * self.input_shape[0]

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        return batched.linear(batched.spatial_mean(x, folded[0].shape[0]), *folded)

    def plain_parts(self) -> list[segments.PlainPart]:
        sizes: Arguments = {"in_features": self.input_shape[0], "out_features": self.classes}
        mean = LayerSpec("mean", "AdaptiveAvgPool2d", {"output_size": 1})
        before = [mean, LayerSpec("flatten", "Flatten", {})] if len(self.input_shape) > 1 else []
        return [segments.PlainPart("classifier", [*before, LayerSpec("linear", "Linear", sizes)])]
