"""A training or validation pass of one env whose results still lie on the device, and how they are
read.

A loop over envs starts the passes of all of them and reads all results together, so that it waits
for the device once per env-step. Made by benchmarks/baseline_env.py, read there and by
benchmarks/loops.py.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.baseline_attribution import ValidationReading
from benchmarks.baseline_lifecycle import SlotMachine, clamp01

VANISHING = 1e-7  # norm of a parameter tensor's gradient
EXPLODING = 10.0
TINY = 1e-8  # gradient norms below this give no ratio


class GradientReading(NamedTuple):
    """Gradient telemetry of one seed, field by field as in state.GradientStats."""

    l2: float
    health: float
    vanishing: bool
    exploding: bool
    ratio: float


class GradientNorms(NamedTuple):
    """Norms of one seed's gradient before clipping, on the device."""

    host: Tensor  # float64 [1], of the whole host
    host_count: int  # numbers in it
    seed: Tensor  # float64 [k], one per parameter tensor of seed and gate that has a gradient
    seed_count: int


class TrainReading(NamedTuple):
    """Results of one training pass."""

    loss: float  # mean of batch means
    accuracy: float  # percent
    gradients: dict[int, GradientReading]  # by slot number, where measured


class TrainPass(NamedTuple):
    """A training pass on the device."""

    sums: Tensor  # float64 [2], of the batches' losses and of the hits
    num_batches: int
    num_images: int
    norms: dict[int, GradientNorms]  # by slot number, where measured

    @property
    def numbers(self) -> Tensor:
        """What `read` needs, float64."""
        parts = (part for norms in self.norms.values() for part in (norms.host, norms.seed))
        return torch.cat((self.sums, *parts))

    def read(self, numbers: list[float]) -> TrainReading:
        """The results, of `numbers`."""
        loss, hits = numbers[:2]
        gradients = {}
        place = 2
        for slot, norms in self.norms.items():
            end = place + 1 + len(norms.seed)
            gradients[slot] = gradient_reading(norms, numbers[place], numbers[place + 1 : end])
            place = end
        return TrainReading(loss / self.num_batches, 100.0 * hits / self.num_images, gradients)


class ValidationPass(NamedTuple):
    """A validation pass on the device."""

    # Float64 [1 + K], of the batches' losses under the first subset, and of the hits under each.
    numbers: Tensor
    codes: Sequence[int]  # the K subsets
    num_batches: int
    num_images: int
    ablated: tuple[int, ...]
    fossils: tuple[int, ...]

    def read(self, numbers: list[float]) -> ValidationReading:
        """The results, of `numbers`."""
        hits = zip(self.codes, numbers[1:], strict=True)
        accuracy = {code: 100.0 * count / self.num_images for code, count in hits}
        loss = numbers[0] / self.num_batches
        return ValidationReading(loss, accuracy, self.ablated, self.fossils)


def read_together(passes: Sequence[TrainPass | ValidationPass]) -> list[list[float]]:
    """The numbers of every pass, in one copy from the device."""
    of_each = [each.numbers for each in passes]
    flat = torch.cat(of_each).tolist()
    ends = accumulate(len(numbers) for numbers in of_each)
    return [flat[end - len(numbers) : end] for numbers, end in zip(of_each, ends, strict=True)]


def tensor_norms(parameters: list[nn.Parameter]) -> tuple[Tensor, int]:
    """L2 norms [k] (float64) of the gradients that exist, and how many numbers they hold."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return torch.stack(norms), sum(gradient.numel() for gradient in gradients)


def gradient_reading(norms: GradientNorms, host: float, sizes: list[float]) -> GradientReading:
    """Health falls with vanishing and exploding tensors; ratio of root mean squares."""
    vanishing = sum(size < VANISHING for size in sizes)
    exploding = sum(not size <= EXPLODING for size in sizes)
    total = math.sqrt(sum(size * size for size in sizes))
    health = clamp01(1.0 - 0.5 * vanishing / len(sizes) - 0.8 * exploding / len(sizes))
    ratio = 0.0
    if math.isfinite(total) and math.isfinite(host) and total >= TINY and host >= TINY:
        ratio = (total / math.sqrt(norms.seed_count)) / (host / math.sqrt(norms.host_count) + TINY)
    return GradientReading(
        total, health if math.isfinite(total) else 0.0, vanishing > 0, exploding > 0, ratio
    )


def record_gradients(machine: SlotMachine, reading: GradientReading) -> None:
    """Write one reading into the slot; a norm that is not finite is kept as 0 and flagged."""
    seed = machine.seed
    seed.gradient_norm = reading.l2 if math.isfinite(reading.l2) else 0.0
    seed.gradient_health = reading.health
    seed.gradient_measured = True
    seed.gradient_vanishing = reading.vanishing
    seed.gradient_exploding = reading.exploding
    machine.record_gradient_ratio(reading.ratio)
