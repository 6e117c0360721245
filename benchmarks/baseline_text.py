"""Transformer, seeds and gate of one env as ordinary nn.Modules, written as plainly as possible.

The opponent of the engine on text; it shares no code with it. Features are [B, T, C].
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baseline_modules import FlatModule, Graft, graft_forward
from esper_soa.config.nets import TaskConfig
from esper_soa.vocabulary import Blueprint

FEATURE_DIMS = 2  # of features behind the batch
SEED_HEADS = 4


class CausalAttention(nn.Module):
    """Self-attention over a position and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(found.transpose(1, 2).flatten(2))


class AttentionSeed(FlatModule):
    """x + attention(x), whose last layer begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = CausalAttention(width, SEED_HEADS)
        nn.init.zeros_(self.attention.project.weight)
        nn.init.zeros_(self.attention.project.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class NormSeed(FlatModule):
    """x + tanh(scale) (layer norm(x) - x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.scale) * (self.norm(x) - x)


class LinearSeed(FlatModule):
    """x + up(down(x)), or x + up(gelu(down(x))) with biases; `up` begins at 0."""

    def __init__(self, width: int, hidden: int, perceptron: bool) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden, bias=perceptron)
        self.up = nn.Linear(hidden, width, bias=perceptron)
        self.perceptron = perceptron
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x)
        return x + self.up(F.gelu(hidden) if self.perceptron else hidden)


def make_seed(blueprint: int, width: int, blend: int) -> FlatModule:
    """A new seed, initialised from torch's global random state; the same for all blends."""
    if blueprint in (Blueprint.ATTENTION, Blueprint.FLEX_ATTENTION):
        return AttentionSeed(width)
    if blueprint == Blueprint.NORM:
        return NormSeed(width)
    ranks = {Blueprint.LORA: 8, Blueprint.LORA_LARGE: 32}
    times = {Blueprint.MLP_SMALL: 2, Blueprint.MLP: 4}
    perceptron = blueprint in times
    hidden = times[blueprint] * width if perceptron else ranks[blueprint]
    return LinearSeed(width, hidden, perceptron)


class Gate(FlatModule):
    """Amplitude in (0, 1) per sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = max(8, width // 4)
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, 1, 1]."""
        return torch.sigmoid(self.outer(F.relu(self.inner(x.mean(dim=1)))))[:, None]


class Layer(nn.Module):
    """Attention, then two linear layers, each of normalised features and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.hide = nn.Linear(width, 4 * width)
        self.give = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.give(F.gelu(self.hide(self.norm2(x))))


class Host(FlatModule):
    """Embeddings, layers with a slot behind every segment, and a head tied to the embeddings."""

    def __init__(self, task: TaskConfig) -> None:
        super().__init__()
        sizes = task.transformer
        self.tokens = nn.Embedding(task.classes, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=sizes.embedding_std)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.each = sizes.layers // sizes.segments

    def forward(self, tokens: Tensor, grafts: Mapping[str, Graft]) -> Tensor:
        """Logits [B*T, V] of tokens [B, T]; `grafts`: seeds by slot name."""
        x = self.tokens(tokens) + self.positions.weight
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            slot = f"r0c{number // self.each - 1}"
            if number % self.each == 0 and slot in grafts:
                x = graft_forward(grafts[slot], x)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
