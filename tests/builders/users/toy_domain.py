"""A domain that the package does not know, defined here: sentences of whole numbers, hosts that
embed them and tag every position, and blueprints of their own. A run of it is a run like any other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper_soa
from esper_soa.config.nets import SEQUENCES, DataConfig
from esper_soa.nets.data.batches import Draw, SampleSpec
from esper_soa.nets.model.head import Classifier
from esper_soa.nets.model.parts import SPREAD, Arguments, LayerSpec, Parameter
from esper_soa.nets.model.segments import Forward, PlainPart, SlotNumbers, StatelessSegment
from esper_soa.system import streams

WORDS = 7
LENGTH = 6  # positions of a sentence
WIDTH = 8  # channels of features
CLASSES = 3
TRAIN = 64
TEST = 32


# --- the data


class Training(NamedTuple):
    """Sentences [B, n*LENGTH], labels [B, n, LENGTH]."""

    source: "Sentences"
    draw: Draw

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        samples, keys, start = self.draw.batches(envs, index)
        words = self.source.words[samples]
        if self.draw.augment:  # another first word
            counters = start + torch.arange(samples.shape[1])
            words = words.clone()
            words[..., 0] = streams.integers(keys[:, None], counters, WORDS)
        return words.transpose(0, 1).flatten(1), targets(words).transpose(0, 1)


class Validation(NamedTuple):
    """As Training, and every sentence as it is; place -1 has label -1."""

    source: "Sentences"
    order: Tensor
    first_sentence: int

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        order = self.order[None] if self.order.ndim == 1 else self.order[envs]
        return list(self._parts(order.T.split(size)))

    def _parts(self, parts: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for part in parts:
            words = self.source.words[self.first_sentence + part.clamp(min=0)]
            yield words.flatten(1), torch.where(part[..., None] < 0, -1, targets(words))

    def first(self, count: int) -> "Validation":
        return self._replace(order=self.order[..., :count])


def targets(words: Tensor) -> Tensor:
    """What to say at each position [..., LENGTH]: it depends on the word and the one before it."""
    return (words + F.pad(words, (1, -1))) % CLASSES


@esper_soa.dataset("sentences")
class Sentences:
    """TRAIN training, TEST validation and TEST test sentences."""

    name = "sentences"
    source = "sentences that a test makes"
    identity = "1"
    notes = ()
    num_classes = CLASSES
    spec = SampleSpec("sentences", (LENGTH,), 8 * LENGTH, 8 * LENGTH, num_targets=LENGTH)

    def __init__(self, cfg: DataConfig) -> None:
        draws = torch.arange((TRAIN + 2 * TEST) * LENGTH)
        self.words = streams.integers(torch.tensor(5), draws, WORDS).view(-1, LENGTH)
        parts = targets(self.words).split((TRAIN, TEST, TEST))
        self.train_labels, self.val_labels, self.test_labels = parts

    def to(self, device: torch.device | str) -> Self:
        return self

    def facts(self) -> dict[str, str]:
        return {"name": self.name, "source": self.source, "identity": self.identity}

    def input_spec(self) -> dict:
        return {"name": "words", "shape": [LENGTH], "dtype": "int64"}

    def samples(self, part: str, places: Tensor) -> tuple[Tensor, Tensor]:
        first = {"train": 0, "validation": TRAIN, "test": TRAIN + TEST}[part]
        words = self.words[first + places]
        return words, targets(words)

    def training(self, draw: Draw, dtype: torch.dtype) -> Training:
        return Training(self, draw)

    def validation(self, order: Tensor, dtype: torch.dtype) -> Validation:
        return Validation(self, order, TRAIN)

    def test(self, order: Tensor, dtype: torch.dtype) -> Validation:
        return Validation(self, order, TRAIN + TEST)


# --- hosts


def own_layer(module: type[nn.Module], **arguments: int) -> list[LayerSpec]:
    """A layer of this file."""
    kind = f"{module.__module__}:{module.__name__.lower()}"
    named: Arguments = {**arguments}
    return [LayerSpec("own", kind, named)]


@dataclass(frozen=True)
class Embed(StatelessSegment):
    """Features [B, n*WIDTH, LENGTH] of words [B, n*LENGTH], or [B, LENGTH] for all."""

    slot: int = -1

    kind = "embed"
    input_shape = (LENGTH,)
    output_shape = (WIDTH, LENGTH)
    parameters = (Parameter((WORDS, WIDTH), bound=1.0),)
    slot_shapes = (output_shape,)
    products = 0
    activations = WIDTH * LENGTH

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        words = x.unflatten(1, (-1, LENGTH)).expand(-1, run.num_nets, -1)
        found = folded[0][torch.arange(run.num_nets)[:, None], words]
        return run.fill(self.slot, found.transpose(2, 3).flatten(1, 2))

    def plain_parts(self) -> list[PlainPart]:
        return [PlainPart("embed", own_layer(Embedded, words=WORDS, width=WIDTH), slot=self.slot)]


@dataclass(frozen=True)
class Mix(StatelessSegment):
    """x + ReLU(linear(x + x one position before))."""

    number: int
    slot: int = -1

    kind = "mix"
    input_shape = output_shape = (WIDTH, LENGTH)
    parameters = (SPREAD.tensor((WIDTH, WIDTH), WIDTH), SPREAD.tensor((WIDTH,), WIDTH))
    slot_shapes = (output_shape,)
    products = WIDTH * WIDTH * LENGTH
    activations = WIDTH * LENGTH

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        weight, bias = folded
        near = (x + F.pad(x, (1, -1))).unflatten(1, (-1, WIDTH))
        mixed = torch.einsum("noi,bnit->bnot", weight, near) + bias[..., None]
        return run.fill(self.slot, x + F.relu(mixed).flatten(1, 2))

    def plain_parts(self) -> list[PlainPart]:
        layers = own_layer(Mixed, width=WIDTH)
        return [PlainPart(f"mix{self.number}", layers, residual=True, slot=self.slot)]


@dataclass(frozen=True)
class Tagger(StatelessSegment, Classifier):
    """Logits [B, n, LENGTH, CLASSES]: a linear classifier at every position."""

    kind = "tagger"
    input_shape = (WIDTH, LENGTH)
    output_shape = (CLASSES,)
    parameters = (SPREAD.tensor((CLASSES, WIDTH), WIDTH), SPREAD.tensor((CLASSES,), WIDTH))
    slots = ()
    slot_shapes = ()
    products = CLASSES * WIDTH * LENGTH
    activations = CLASSES * LENGTH

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        weight, bias = folded
        each = x.unflatten(1, (-1, WIDTH))
        return torch.einsum("noi,bnit->bnto", weight, each) + bias[:, None]

    def plain_parts(self) -> list[PlainPart]:
        return [PlainPart("tagger", own_layer(Tagged, width=WIDTH, classes=CLASSES))]


@esper_soa.host("tagging")
@dataclass(frozen=True)
class Tagging:
    """A word embedding, two residual segments, a head; slots behind all but the last."""

    def segments(self, slots: SlotNumbers) -> tuple[Embed | Mix | Tagger, ...]:
        places = [slots.get((0, number), -1) for number in range(3)]
        return Embed(places[0]), Mix(1, places[1]), Mix(2, places[2]), Tagger()


# --- the same as plain modules of one network


@esper_soa.layer("embedded")
class Embedded(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(words, width))

    def forward(self, words: Tensor) -> Tensor:
        return self.table[words].transpose(1, 2)


@esper_soa.layer("mixed")
class Mixed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        near = x + F.pad(x, (1, -1))
        return F.relu(self.linear(near.transpose(1, 2))).transpose(1, 2)


@esper_soa.layer("tagged")
class Tagged(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2))


# --- what grows


@esper_soa.blueprint("perceptron", topology=SEQUENCES)
class Perceptron(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(channels, 2 * channels)
        self.second = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)


@esper_soa.blueprint("shift", topology=SEQUENCES)
class Shift(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(F.pad(x, (1, -1)).transpose(1, 2))).transpose(1, 2)
