"""The parts of seeds in the slots of transformers, on features [B, C, T]: each works on channels of
a position, and attention on the positions before it too.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.nets import ATTENTION_HEADS, SEQUENCES
from esper_soa.nets import sequences
from esper_soa.nets.batched import NORM_EPS
from esper_soa.nets.model import parts


class SequencePart(parts.Part):
    """A part that takes and gives features [B, C, T]."""

    topology = SEQUENCES


@dataclass(frozen=True)
class Dense(SequencePart):
    """Linear layer of every position, then the exact GELU where asked for."""

    outputs: parts.Width = parts.CHANNELS
    bias: bool = True
    gelu: bool = False
    start: parts.Start = parts.SPREAD  # of weight and bias

    def outputs_of(self, inputs: int, channels: int) -> int:
        return self.outputs.of(channels)

    def parameters(self, inputs: int, channels: int) -> tuple[parts.Parameter, ...]:
        """Weight [O, I] and, where it has one, bias [O]."""
        return parts.linear_parameters(
            inputs, self.outputs.of(channels), self.start, bias=self.bias
        )

    def products(self, inputs: int, channels: int, positions: int) -> int:
        return positions * inputs * self.outputs.of(channels)

    def layers(self, inputs: int, channels: int) -> tuple[parts.LayerSpec, ...]:
        sizes = {"inputs": inputs, "outputs": self.outputs.of(channels), "bias": self.bias}
        return (parts.LayerSpec("dense", "Dense", {**sizes, "gelu": self.gelu}),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        rows = sequences.linear(sequences.rows_of(x, parameters[0].shape[0]), *parameters)
        return sequences.features_of(F.gelu(rows) if self.gelu else rows, x.shape[-1])


@dataclass(frozen=True)
class CausalAttention(SequencePart):
    """Self-attention of `heads` heads over a position and those before it, then a linear layer."""

    heads: int = ATTENTION_HEADS

    def parameters(self, inputs: int, channels: int) -> tuple[parts.Parameter, ...]:
        """Weight [3*I, I] and bias [3*I] of queries, keys and values; those of the last layer."""
        last = parts.linear_parameters(inputs, inputs, parts.ZEROS)
        return *parts.linear_parameters(inputs, 3 * inputs), *last

    def products(self, inputs: int, channels: int, positions: int) -> int:
        """Positions behind are counted too."""
        return positions * inputs * (4 * inputs + 2 * positions)

    def layers(self, inputs: int, channels: int) -> tuple[parts.LayerSpec, ...]:
        sizes: parts.Arguments = {"channels": inputs, "heads": self.heads}
        return (parts.LayerSpec("attention", "CausalAttention", sizes),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        weight, bias, last_weight, last_bias = parameters
        length = x.shape[-1]
        rows = sequences.linear(sequences.rows_of(x, weight.shape[0]), weight, bias)
        rows = sequences.causal_attention(rows, self.heads, length)
        return sequences.features_of(sequences.linear(rows, last_weight, last_bias), length)


@dataclass(frozen=True)
class SoftLayerNorm(SequencePart):
    """x + tanh(strength) (layer norm(x) - x); the strength begins at 0, which changes nothing."""

    def parameters(self, inputs: int, channels: int) -> tuple[parts.Parameter, ...]:
        """Strength [1], then scale and shift [I] of the norm."""
        return parts.ZEROS.tensor((1,)), *parts.norm_parameters(inputs)

    def products(self, inputs: int, channels: int, positions: int) -> int:
        return 0

    def layers(self, inputs: int, channels: int) -> tuple[parts.LayerSpec, ...]:
        sizes = {"channels": inputs, "eps": NORM_EPS}
        return (parts.LayerSpec("soft_norm", "SoftLayerNorm", {**sizes}),)

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        strength, scale, shift = parameters
        rows = sequences.rows_of(x, scale.shape[0])
        normalised = sequences.layer_norm(rows, scale, shift)
        rows = rows + torch.tanh(strength)[:, :, None] * (normalised - rows)
        return sequences.features_of(rows, x.shape[-1])
