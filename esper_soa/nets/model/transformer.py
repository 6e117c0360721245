"""Transformers as hosts: token and position embeddings, pre-norm layers with causal attention, a
head whose weights are the token embeddings (Radford et al. 2019, GPT-2; esper-lite's
kasmina/host.py). Slot r0c{i} stands at the end of segment i.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.config.nets import TaskConfig
from esper_soa.nets import sequences
from esper_soa.nets.batched import NORM_EPS
from esper_soa.nets.model import segments
from esper_soa.nets.model.parts import LayerSpec, Parameter, linear_parameters, norm_parameters

MIB = 2**20
FLOAT_BYTES = 4  # bytes of a number
LOGIT_BYTES = 8  # bytes of a logit and its logarithm
TOKEN_TABLE = 0  # number of the token embeddings among the host's parameters
LAYER_TENSORS = 12  # parameter tensors of a layer
DROPOUT_SITES = 3  # of a layer that drop numbers; one more is behind the embeddings


def drop(rows: Tensor, keys: Tensor | None, site: int, rate: float) -> Tensor:
    """Rows [n, R, C] behind dropout at a place of the network; as they are without `keys`."""
    if keys is None:
        return rows
    factors = sequences.dropout_factors(keys, site, tuple(rows.shape[1:]), rate=rate)
    return rows * factors.to(rows.dtype)


@dataclass(frozen=True)
class Embedding(segments.StatelessSegment):
    """Features [B, n*D, T] of tokens int64 [B, n*T], or [B, T] for all networks."""

    tokens: int  # V
    width: int  # D
    length: int  # T
    dropout: float
    std: float  # of the embeddings, as they begin

    kind = "embedding"
    slots = ()
    slot_shapes = ()
    products = 0

    @property
    def input_shape(self) -> segments.FeatureShape:
        return (self.length,)

    @property
    def output_shape(self) -> segments.FeatureShape:
        return self.width, self.length

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Embeddings [V, D] of tokens and [T, D] of positions."""
        shapes = (self.tokens, self.width), (self.length, self.width)
        return tuple(Parameter(shape, std=self.std) for shape in shapes)

    @property
    def activations(self) -> int:
        return self.width * self.length

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        tokens, positions = folded
        num_nets = tokens.shape[0]
        words = x.unflatten(1, (-1, self.length)).expand(-1, num_nets, -1).transpose(0, 1)
        first = self.tokens * torch.arange(num_nets, device=x.device)[:, None, None]
        embedded = F.embedding(words + first, tokens.flatten(0, 1)) + positions[:, None]
        keys = run.noise() if run.noise and self.dropout else None
        rows = drop(embedded.flatten(1, 2), keys, 0, rate=self.dropout)
        return sequences.features_of(rows, self.length)

    def plain_parts(self) -> list[segments.PlainPart]:
        sizes = {"tokens": self.tokens, "width": self.width, "context": self.length}
        layer = LayerSpec("embed", "TokenEmbedding", {**sizes, "dropout": self.dropout})
        return [segments.PlainPart("embedding", [layer])]


@dataclass(frozen=True)
class Layers(segments.SlotBehind, segments.StatelessSegment):
    """Transformer layers one after the other."""

    number: int
    first: int  # number of its first layer in the host
    count: int
    width: int  # D
    heads: int
    length: int  # T
    dropout: float
    slot: int

    kind = "transformer_layers"

    @property
    def input_shape(self) -> segments.FeatureShape:
        return self.width, self.length

    output_shape = input_shape

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Per layer weight and bias of norm, queries to values, projection, norm, MLP's two."""
        width = self.width
        sizes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
        attend, project, hide, give = (linear_parameters(*size) for size in sizes)
        norm = norm_parameters(width)
        return (*norm, *attend, *project, *norm, *hide, *give) * self.count

    @property
    def products(self) -> int:
        """Attention to positions behind is counted too."""
        return self.count * self.length * self.width * (12 * self.width + 2 * self.length)

    @property
    def activations(self) -> int:
        """16 D of each layer: norms 2, queries, keys, values 3, attention 2, MLP 9. Dropout adds
        the inputs and factors of its two places; of attention weights those and their products.
        """
        dropped = (4 * self.width + 3 * self.heads * self.length) * (self.dropout > 0)
        return self.count * self.length * (16 * self.width + dropped)

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        rate = self.dropout
        keys = run.noise() if run.noise and rate else None
        rows = sequences.rows_of(x, run.num_nets)
        shape = rows.shape[1] // self.length, self.heads, self.length, self.length
        for place in range(self.count):
            tensors = iter(folded[place * LAYER_TENSORS : (place + 1) * LAYER_TENSORS])
            norm, attend, project, norm2, hide, give = zip(tensors, tensors, strict=True)
            site = 1 + DROPOUT_SITES * (self.first + place)
            dropped = None
            if keys is not None:
                factors = sequences.dropout_factors(keys, site, shape, rate=rate)
                dropped = factors.flatten(0, 1).to(rows.dtype)
            mixed = sequences.linear(sequences.layer_norm(rows, *norm), *attend)
            mixed = sequences.causal_attention(mixed, self.heads, self.length, drops=dropped)
            rows = rows + drop(sequences.linear(mixed, *project), keys, site + 1, rate=rate)
            hidden = F.gelu(sequences.linear(sequences.layer_norm(rows, *norm2), *hide))
            rows = rows + drop(sequences.linear(hidden, *give), keys, site + 2, rate=rate)
        return run.fill(self.slot, sequences.features_of(rows, self.length))

    def plain_parts(self) -> list[segments.PlainPart]:
        sizes = {"width": self.width, "heads": self.heads, "dropout": self.dropout, "eps": NORM_EPS}
        layers = [LayerSpec(f"layer{i}", "TransformerLayer", {**sizes}) for i in range(self.count)]
        return [segments.PlainPart(f"layers{self.number}", layers, slot=self.slot)]


@dataclass(frozen=True)
class TiedHead(segments.StatelessSegment):
    """Logits [B, n, T, V]: layer norm, and products with the token embeddings."""

    tokens: int  # V
    width: int  # D
    length: int  # T
    most: int  # logits in memory at the same time, for losses

    kind = "tied_head"
    borrowed = (TOKEN_TABLE,)
    slots = ()
    slot_shapes = ()

    @property
    def input_shape(self) -> segments.FeatureShape:
        return self.width, self.length

    @property
    def output_shape(self) -> segments.FeatureShape:
        return (self.tokens,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Scale and shift of the norm."""
        return norm_parameters(self.width)

    @property
    def products(self) -> int:
        return self.length * self.width * self.tokens

    @property
    def activations(self) -> int:
        return 2 * self.width * self.length

    def loss_bytes(self, num_nets: int, batch: int) -> int:
        """Logits made at once; the gradient of the embeddings, and what a piece adds to it."""
        logits = min(num_nets * batch * self.length * self.tokens, self.most)
        return LOGIT_BYTES * logits + 2 * FLOAT_BYTES * num_nets * self.tokens * self.width

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        scale, shift, table = folded
        rows = sequences.layer_norm(sequences.rows_of(x, run.num_nets), scale, shift)
        return sequences.linear(rows, table).unflatten(1, (-1, self.length)).transpose(0, 1)

    def scores(self, parameters: list[Tensor], x: Tensor, targets: Tensor) -> segments.Scores:
        """Sums of losses [n] and whether answers are right, bool [n, R]; targets int64 [n, R]."""
        scale, shift, table = parameters
        rows = sequences.layer_norm(sequences.rows_of(x, len(table)), scale, shift)
        scores: segments.Scores = sequences.SummedTokenLoss.apply(rows, table, targets, self.most)
        return scores

    def train_loss(
        self, run: segments.Forward, values: segments.Values, x: Tensor, labels: Tensor
    ) -> segments.Scores:
        targets = labels.transpose(0, 1).flatten(1)
        losses, right = self.scores(values.parameters, x, targets)
        return (losses / targets.shape[1]).to(run.dtype), right.sum(1)

    def measure(
        self, run: segments.Forward, folded: list[Tensor], x: Tensor, labels: Tensor, row: int
    ) -> segments.Scores:
        targets = labels.transpose(0, 1).flatten(1)
        found = [self.scores(folded, part, targets) for part in x.split(labels.shape[0])]
        right = torch.stack([right for _, right in found]).unflatten(2, (labels.shape[0], -1))
        return found[row][0].to(run.dtype), right.sum(3)

    def plain_parts(self) -> list[segments.PlainPart]:
        layer = LayerSpec("head", "TiedHead", {"width": self.width, "eps": NORM_EPS})
        return [segments.PlainPart("head", [layer])]


@dataclass(frozen=True)
class Transformer:
    """The hosts that task.transformer describes."""

    task: TaskConfig

    def segments(self, slots: segments.SlotNumbers) -> tuple[Embedding | Layers | TiedHead, ...]:
        """Embedding, segments of layers, head."""
        cfg = self.task.transformer
        tokens = self.task.classes
        each = cfg.layers // cfg.segments
        embedding = Embedding(
            tokens, cfg.width, cfg.context, dropout=cfg.dropout, std=cfg.embedding_std
        )
        body = (
            Layers(
                number,
                number * each,
                each,
                width=cfg.width,
                heads=cfg.heads,
                length=cfg.context,
                dropout=cfg.dropout,
                slot=slots.get((0, number), -1),
            )
            for number in range(cfg.segments)
        )
        most = cfg.logits_mib * MIB // LOGIT_BYTES
        return embedding, *body, TiedHead(tokens, cfg.width, cfg.context, most=most)
