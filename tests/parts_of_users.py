"""Parts that a user might write, the good and the faulty, as a module that settings can name: parts_of_users:NAME."""

import torch
from torch import Tensor, nn

import esper_soa
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.parts import NARROW, Conv, Part, SoftNorm


@esper_soa.blueprint("twice")
def twice() -> tuple[Part, ...]:
    return Conv(kernel=1), Conv(kernel=1)


@esper_soa.blueprint("instead")
def instead() -> Architecture:
    return Architecture(0, "", (Conv(kernel=1), SoftNorm()), residual=False)


@esper_soa.blueprint("grouped")
class Grouped(nn.Module):
    """With a norm of groups, as convolutional seeds have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


@esper_soa.blueprint("perceptron")
def perceptron(channels: int) -> nn.Module:
    """Without a convolution: the mean of an image moves all of its pixels; writes to what it is given."""

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

        def forward(self, x: Tensor) -> Tensor:
            moved = self.outer(torch.tanh(self.inner(x.mean((2, 3)))))
            return x.mul_(1.5).add_(moved[..., None, None])

    return Perceptron()


# --- the faulty


@esper_soa.blueprint("same")
def one_of_two() -> tuple[Part, ...]:
    return (Conv(),)


@esper_soa.blueprint("same")
def other_of_two() -> tuple[Part, ...]:
    return (Conv(),)


@esper_soa.blueprint("norm")
def taken() -> tuple[Part, ...]:
    return (Conv(),)


@esper_soa.blueprint("narrower")
def narrower() -> tuple[Part, ...]:
    return (Conv(NARROW),)


@esper_soa.blueprint("word")
def word() -> str:
    return "conv_light"


@esper_soa.blueprint("bare")
def bare() -> nn.Module:
    return nn.Conv2d(8, 8, 1)


@esper_soa.blueprint("greedy")
def greedy(channels: int, more: int) -> nn.Module:
    return nn.Conv2d(channels, more, 1)


@esper_soa.blueprint("counting")
class Counting(nn.BatchNorm2d):
    """Running statistics, which all networks would share."""


@esper_soa.blueprint("empty")
class Empty(nn.Identity):
    def __init__(self, channels: int) -> None:
        super().__init__()


@esper_soa.blueprint("frozen")
class Frozen(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1, bias=False)
        self.weight.requires_grad_(False)


@esper_soa.blueprint("shrinking")
class Shrinking(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3)


@esper_soa.blueprint("half")
class Half(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16()


@esper_soa.blueprint("failing")
def failing(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 1, groups=channels + 1)


def unmarked() -> tuple[Part, ...]:
    return (Conv(),)
