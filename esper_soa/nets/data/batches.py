"""The protocols of batch sources and of their feeds.

A source holds training, validation and test samples on one device. Rewards, gates and observations
see the validation samples; the test samples are for the figures at the end. The world decides which
samples an env-step draws (orders.py); the source makes batches of them, which an engine asks for
env by env. Images are the first source (image_set.py, images.py).
"""

from math import prod
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from esper_soa.config.ranges import AUTO
from esper_soa.system import streams
from esper_soa.system.errors import check


class TrainingFeed(Protocol):
    """Training batches of one env-step."""

    @property
    def draw(self) -> "Draw":
        """The samples that envs draw in it."""

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Inputs [B, n*C, ...] of samples [C, ...] and labels int64 [B, n], or [B, n, K] of samples
        with K targets, of batch `index` for `envs` (int64 [n]), env by env.
        """


class ValidationFeed(Protocol):
    """Batches of validation or test samples, the same at every env-step."""

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of all batches for `envs`, at most `size` samples each.

        Shapes as in TrainingFeed; n = 1 where all envs share the samples. Label -1 does not count.
        """

    def first(self, count: int) -> "ValidationFeed":
        """A feed of the first `count` samples only."""


class SampleSpec(NamedTuple):
    """Shape and counts of a source's samples, known before they are read."""

    name: str  # in messages, in the plural: "images"
    shape: tuple[int, ...]  # of an input
    train_bytes: int  # memory of a training sample on the device, at least
    test_bytes: int  # of a validation or test sample
    cuts: frozenset[str] = frozenset()  # methods of feeds by which engines cut batches themselves
    num_targets: int = 1  # K, labels of a sample
    perplexity: bool = False  # whether tables tell the loss too, and its exponential

    @property
    def elements(self) -> int:
        """Numbers of an input."""
        return prod(self.shape)


class SampleCount(NamedTuple):
    """How many samples there are."""

    train: int  # with those that are set aside from them for validation
    others: int  # test samples, and those of a validation part


class BatchSource(Protocol):
    """D training samples, validation and test samples on one device.

    name: of the data set, in tables. source: a sentence that says where the samples are from and
    how many there are. notes: what was done to them, a clause each. identity: digest of all that
    networks see of them. num_classes: what hosts must have; None for any number that holds the
    labels. Labels: int64 [D], or [D, K] for K targets, and so for the other two parts.
    """

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def identity(self) -> str: ...
    @property
    def spec(self) -> SampleSpec: ...
    @property
    def num_classes(self) -> int | None: ...
    @property
    def train_labels(self) -> Tensor: ...
    @property
    def val_labels(self) -> Tensor: ...
    @property
    def test_labels(self) -> Tensor: ...

    def to(self, device: torch.device | str) -> Self:
        """The same samples on `device`."""

    def facts(self) -> dict[str, str]:
        """Entry of the source in versions.json."""

    def input_spec(self) -> dict:
        """Plain values that files of networks tell of their inputs: at least `shape`, and where
        they are no images "RGB" also `name` and `dtype`.
        """

    def samples(self, part: str, places: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [B, ...], as grown networks take them, and labels of samples of a part: "train",
        "validation" or "test"; places: int64 [B].
        """

    def training(self, draw: "Draw", dtype: torch.dtype) -> TrainingFeed:
        """Batches of the samples that an env-step draws; inputs in `dtype`."""

    def validation(self, order: Tensor, dtype: torch.dtype) -> ValidationFeed:
        """Batches of validation samples int64 [v], shared by all envs, or [N, v], -1 for none."""

    def test(self, order: Tensor, dtype: torch.dtype) -> ValidationFeed:
        """Batches of the test samples `order`, as of `validation`."""


def origin(source: BatchSource) -> dict[str, str]:
    """Name, source and identity, which checkpoints and files of networks tell of the samples."""
    return {"name": source.name, "source": source.source, "identity": source.identity}


class LabelNoise(NamedTuple):
    """Labels of N envs that are drawn among all classes: those of a share of the samples."""

    share: Tensor  # float64 [N]
    keys: Tensor  # int64 [N], streams: a sample has one label as long as they stay
    num_classes: int
    # Int64 [N, 1], the first sample of each env's data set, where they take several in turn.
    first: Tensor | None = None

    def of(self, envs: Tensor, samples: Tensor, labels: Tensor) -> Tensor:
        """Labels int64 [n, m] that `envs` [n] get for samples [n, m] with the true `labels`."""
        keys = self.keys[envs, None]
        samples = samples if self.first is None else samples - self.first[envs]
        drawn = streams.uniform(keys, 2 * samples, torch.float64) < self.share[envs, None]
        return torch.where(drawn, streams.integers(keys, 2 * samples + 1, self.num_classes), labels)


class Draw(NamedTuple):
    """The samples that N envs draw in an env-step."""

    order: Tensor  # int64 [N, T], training samples
    keys: Tensor  # int64 [N], streams of augmentation
    start: int  # samples that each env drew before this env-step
    batch_size: int  # B
    augment: bool  # whether samples are changed at random, as their source does it
    label_noise: LabelNoise | None = None  # images alone

    def batches(self, envs: Tensor, index: int, count: int = 1) -> tuple[Tensor, Tensor, int]:
        """Samples int64 [n, count * B] of `envs` [n] from batch `index` on, streams [n], and how
        many samples each env drew before.
        """
        first = index * self.batch_size
        samples = self.order[:, first : first + count * self.batch_size][envs]
        return samples, self.keys[envs], self.start + first

    def noise(self, envs: Tensor, index: int) -> Tensor:
        """Streams int64 [n] of what the networks of `envs` draw in batch `index`."""
        keys = streams.fold(self.keys[envs], streams.DROPOUT)
        return streams.fold(keys, self.start + index * self.batch_size)


def check_work(source: BatchSource, train_samples: int, val_samples: int) -> None:
    """Raise SettingError where an env-step would need more samples than there are."""
    for setting, value, available, kind, change in (
        ("train_samples", train_samples, len(source.train_labels), "training", "lower"),
        ("val_samples", val_samples, len(source.val_labels), "validation", "raise"),
    ):
        allowed = f"at most {available}, the {kind} {source.spec.name} of {source.name}"
        remedy = f"Lower {setting}, {change} data.validation_images, or choose a larger data set."
        check(value <= available, setting, value, allowed=allowed, remedy=remedy)


def check_inputs(source: BatchSource, host: str, shape: tuple[int, ...]) -> None:
    """Raise SettingError where hosts `host`, which take inputs of `shape`, do not take samples."""
    spec = source.spec
    allowed = f"a host of {spec.name} {list(spec.shape)}, not of inputs {list(shape)}"
    remedy = f"Or choose other data than {source.name} with data.name."
    check(spec.shape == shape, "task.host", host, allowed=allowed, remedy=remedy)


def check_classes(source: BatchSource, num_classes: int, is_alone: bool = True) -> None:
    """Raise SettingError where hosts have too few classes, or not those that the source names,
    which may be fewer than those of other sets where it does not stand alone.
    """
    setting = "task.num_classes"
    due = source.num_classes
    allowed = f"{due}, the classes of {source.name}"
    fits = due in (None, num_classes) or (not is_alone and (due or 0) < num_classes)
    remedy = f"Give {setting}={due}, or {AUTO}."
    check(fits, setting, num_classes, allowed=allowed, remedy=remedy)
    parts = source.train_labels, source.val_labels, source.test_labels
    num_found = 1 + max(int(labels.max()) for labels in parts)
    allowed = f"at least {num_found}, the classes of {source.name}"
    check(num_classes >= num_found, setting, num_classes, allowed=allowed)
