"""A source of vectors with two targets each, defined here: the world draws it as it draws images,
and engines that cut images refuse it.
"""

from typing import NamedTuple, Self

import pytest
import torch
from tiny_world import CPU, tiny_settings
from torch import Tensor

from esper_soa.config.errors import SettingError
from esper_soa.config.nets import DataConfig
from esper_soa.env.world import World
from esper_soa.nets import batched
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.data import streams
from esper_soa.nets.data.batches import BatchSource, Draw, SampleSpec
from esper_soa.nets.data.images import IMAGES, crops_of
from esper_soa.nets.data.orders import validation_order
from esper_soa.nets.engine import Sizes
from esper_soa.training.build import build_rules, trial_of

ENVS = 3
TRAIN = 12
TEST = 5
WIDTH = 4  # numbers of a vector
TARGETS = 2
VECTORS = SampleSpec("vectors", (WIDTH,), 4 * WIDTH, 4 * WIDTH, num_targets=TARGETS)


class TrainingVectors(NamedTuple):
    """Vectors [B, n*WIDTH] with noise, labels [B, n, TARGETS]."""

    source: "Vectors"
    draw: Draw
    dtype: torch.dtype

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        samples, keys, start = self.draw.batches(envs, index)
        inputs, labels = self.source.of(samples)
        if self.draw.augment:
            counters = start + torch.arange(samples.shape[1])
            inputs = inputs + streams.uniform(keys[:, None], counters)[..., None]
        return inputs.transpose(0, 1).flatten(1).to(self.dtype), labels.transpose(0, 1)


class ValidationVectors(NamedTuple):
    """As TrainingVectors, without noise; place -1 has label -1."""

    source: "Vectors"
    order: Tensor
    dtype: torch.dtype

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        order = self.order[None] if self.order.ndim == 1 else self.order[envs]
        found = []
        for part in order.split(size, dim=1):
            inputs, labels = self.source.of(part.clamp(min=0) + TRAIN)
            labels = torch.where(part[..., None] < 0, -1, labels)
            found.append((inputs.transpose(0, 1).flatten(1).to(self.dtype), labels.transpose(0, 1)))
        return found

    def first(self, count: int) -> "ValidationVectors":
        return self._replace(order=self.order[..., :count])


class Vectors:
    """TRAIN training vectors, then TEST test vectors; the number of a vector is in its values."""

    name = "numbers"
    source = "vectors that a test defines"
    identity = "0"
    notes = ()
    spec = VECTORS
    num_classes = None

    def __init__(self) -> None:
        _, labels = self.of(torch.arange(TRAIN + TEST))
        self.train_labels, self.val_labels = labels.split((TRAIN, TEST))
        self.test_labels = self.val_labels

    def to(self, device: torch.device | str) -> Self:
        return self

    def facts(self) -> dict[str, str]:
        return {"name": self.name}

    def training(self, draw: Draw, dtype: torch.dtype) -> TrainingVectors:
        return TrainingVectors(self, draw, dtype)

    def validation(self, order: Tensor, dtype: torch.dtype) -> ValidationVectors:
        return ValidationVectors(self, order, dtype)

    test = validation

    def of(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, B, WIDTH] and labels [n, B, TARGETS]."""
        inputs = 100.0 * samples[..., None] + torch.arange(WIDTH)
        return inputs, torch.stack((samples % 10, samples % 2), dim=-1)


def world(data: DataConfig, num_envs: int = ENVS) -> World:
    rules = build_rules(tiny_settings(num_envs, 2, 4), CPU)
    source: BatchSource = Vectors()
    sizes = Sizes(num_envs, batch_size=2, train_samples=6, val_samples=4)
    return World(rules, source, sizes, data, seed=3)


def test_an_env_step_draws_vectors_in_passes_with_noise_from_the_streams_of_each_env() -> None:
    made = world(DataConfig())
    made.start_round(1)
    drawn = []
    keys = streams.stream_keys(3, streams.AUGMENTATION, (1,), made.envs)
    for step in range(2):
        work = made.work(step)
        assert work.num_batches == 3
        for index in range(3):
            inputs, labels = work.training.batch(made.envs, index)
            assert inputs.shape == (2, ENVS * WIDTH)
            assert labels.shape == (2, ENVS, TARGETS)
            numbers = inputs.view(2, ENVS, WIDTH)[..., 0].div(100, rounding_mode="floor").long()
            assert torch.equal(labels[..., 0], numbers % 10)
            counters = torch.arange(2) + 6 * step + 2 * index
            noise = streams.uniform(keys[:, None], counters).T
            torch.testing.assert_close(
                inputs[:, ::WIDTH] - 100.0 * numbers, noise, atol=1e-4, rtol=0
            )
            drawn.append(numbers)
    whole = torch.cat(drawn).T.sort(dim=1).values
    assert torch.equal(whole, torch.arange(TRAIN).expand(ENVS, TRAIN))


def test_validation_is_on_the_same_vectors_for_all_envs_or_on_a_share_for_each() -> None:
    plain = world(DataConfig(augment=False))
    (inputs, labels), (rest, _) = plain.validation.batches(plain.envs, 3)
    assert [tuple(one.shape) for one in (inputs, labels, rest)] == [(3, 4), (3, 1, 2), (1, 4)]
    numbers = torch.cat((inputs, rest))[:, 0] / 100 - TRAIN
    assert torch.equal(numbers.long(), validation_order(TEST, 4, 3))
    (few,) = plain.validation.first(1).batches(plain.envs, 3)
    assert torch.equal(few[0], inputs[:1])

    split = world(DataConfig(split=True), num_envs=2)
    assert split.sizes.train_samples == TRAIN // 2
    ((own, answers),) = split.validation.batches(split.envs, 9)
    assert own.shape == (3, 2 * WIDTH)
    assert sorted(own[:, ::WIDTH][answers[..., 0] >= 0].tolist()) == [1200, 1300, 1400, 1500, 1600]


def test_work_that_vectors_do_not_have_is_refused_in_their_words() -> None:
    rules = build_rules(tiny_settings(ENVS, 2, 4), CPU)
    told = "train_samples=14: must be at most 12, the training vectors of numbers"
    with pytest.raises(SettingError, match=told):
        World(rules, Vectors(), Sizes(ENVS, 2, 14, 4), DataConfig(), seed=3)


def test_engines_that_cut_images_refuse_vectors_and_torch_takes_them() -> None:
    trial = trial_of(tiny_settings(ENVS, 2, 4), CPU)._replace(spec=VECTORS)
    why = "kernels cut crops of images, not of vectors"
    for name in ("native", "triton", "triton_graphs"):
        with pytest.raises(SettingError, match=f"compute.engine={name}.*{why}"):
            choose_engine(name, trial)
    chosen = choose_engine("auto", trial).chosen
    assert chosen.name == "torch"
    assert why in chosen.reason
    several = trial._replace(spec=IMAGES._replace(num_targets=2))
    with pytest.raises(
        SettingError, match="kernels take one label per sample, not the 2 of images"
    ):
        choose_engine("native", several)
    feed = Vectors().training(
        Draw(torch.zeros(1, 2).long(), torch.zeros(1).long(), 0, 2, False), torch.float32
    )
    with pytest.raises(LookupError, match="TrainingVectors offers no crops"):
        crops_of(feed)


def test_loss_and_right_answers_are_those_of_all_targets_of_a_network() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, ENVS, TARGETS, 7, generator=generator)
    labels = torch.randint(7, (5, ENVS, TARGETS), generator=generator)
    loss, correct = batched.loss(logits, labels)
    each = [batched.loss(logits[:, :, k], labels[:, :, k]) for k in range(TARGETS)]
    torch.testing.assert_close(loss, sum(one for one, _ in each) / TARGETS)
    assert torch.equal(correct, each[0][1] + each[1][1])
    rows = torch.stack((logits, -logits))
    flat, targets = batched.by_target(rows, labels)
    assert torch.equal((flat.argmax(-1) == targets).sum(1)[0], correct)
