"""Ten networks of the field as hosts of plain modules, small and for images of 32x32 pixels.

They are written after the papers that they name, without dropout, stochastic depth and the strides
that first make images of 224x224 pixels smaller.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_soa import host

Layers = nn.Sequential


def normed(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Layers:
    """Convolution and batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return Layers(conv, nn.BatchNorm2d(outputs))


def preactivated(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> Layers:
    """Batch norm, ReLU, convolution."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return Layers(nn.BatchNorm2d(inputs), nn.ReLU(), conv)


def perceptron(inputs: int, hidden: int) -> Layers:
    return Layers(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, inputs))


def head(channels: int, classes: int, *first: nn.Module) -> Layers:
    """Logits by the mean of the pixels."""
    return Layers(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Joined(nn.Module):
    """What parts make of x: the first of it, joined with the second."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.join = join
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(*(part(x) for part in self.parts))


def beside(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], 1)


def added(*body: nn.Module, shortcut: nn.Module | None = None) -> nn.Module:
    return Joined(torch.add, shortcut or nn.Identity(), Layers(*body))


def excited(channels: int) -> nn.Module:
    """x times a number of each channel, made of the means of all."""
    hidden = max(8, channels // 32 * 8)
    narrow = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), nn.ReLU()
    factors = Layers(*narrow, nn.Conv2d(hidden, channels, 1), nn.Hardsigmoid())
    return Joined(torch.mul, nn.Identity(), factors)


class Turned(nn.Module):
    """A body on the pixels of images as tokens [B, H W, C], or on transposed tokens, and back."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = Layers(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def stages(block: Callable[[int, int, int], nn.Module], *widths: int) -> list[nn.Module]:
    """Two blocks each, of which the first has a stride but in the first stage."""
    blocks = list[nn.Module]()
    for inputs, width in pairwise(widths):
        blocks += [block(inputs, width, 2 if blocks else 1), block(width, width, 1)]
    return blocks


@host("resnet18")
def resnet18(classes: int) -> Layers:
    """He et al. 2016, with a width of 16."""

    def block(inputs: int, width: int, stride: int) -> Layers:
        shortcut = normed(inputs, width, 1, stride) if inputs != width else None
        body = normed(inputs, width, 3, stride), nn.ReLU(), normed(width, width, 3)
        return Layers(added(*body, shortcut=shortcut), nn.ReLU())

    stem = Layers(normed(3, 16, 3), nn.ReLU())
    return Layers(stem, *stages(block, 16, 16, 32, 64, 128), head(128, classes))


@host("wide_resnet")
def wide_resnet(classes: int) -> Layers:
    """Zagoruyko and Komodakis 2016: WRN-16-2."""

    def block(inputs: int, width: int, stride: int) -> nn.Module:
        shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None
        body = preactivated(inputs, width, 3, stride), preactivated(width, width, 3)
        return added(*body, shortcut=shortcut)

    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    last = head(128, classes, nn.BatchNorm2d(128), nn.ReLU())
    return Layers(stem, *stages(block, 16, 32, 64, 128), last)


@host("regnet")
def regnet(classes: int) -> Layers:
    """Radosavovic et al. 2020: RegNetX with groups of 8 channels."""

    def block(inputs: int, width: int, stride: int) -> Layers:
        shortcut = normed(inputs, width, 1, stride) if inputs != width else None
        grouped = normed(width, width, 3, stride, groups=width // 8)
        body = normed(inputs, width), nn.ReLU(), grouped, nn.ReLU(), normed(width, width)
        return Layers(added(*body, shortcut=shortcut), nn.ReLU())

    stem = Layers(normed(3, 16, 3), nn.ReLU())
    return Layers(stem, *stages(block, 16, 24, 56, 152), head(152, classes))


INVERTED = (  # kernel, hidden channels, outputs, stride
    *((3, 16, 16, 2), (3, 72, 24, 2), (3, 88, 24, 1), (5, 96, 40, 2), (5, 240, 40, 1)),
    *((5, 240, 40, 1), (5, 120, 48, 1), (5, 144, 48, 1), (5, 288, 96, 2), (5, 576, 96, 1)),
    (5, 576, 96, 1),
)


@host("mobilenet_v3_small")
def mobilenet_v3_small(classes: int) -> Layers:
    """Howard et al. 2019, table 2."""
    inputs = 16
    blocks: list[nn.Module] = [Layers(normed(3, inputs, 3), nn.Hardswish())]
    for layer, (kernel, hidden, outputs, stride) in enumerate(INVERTED):
        activation = nn.ReLU() if layer < 3 else nn.Hardswish()
        depthwise = normed(hidden, hidden, kernel, stride, groups=hidden)
        factors = [] if layer in (1, 2) else [excited(hidden)]
        first = normed(inputs, hidden), activation, depthwise, activation
        body = Layers(*first, *factors, normed(hidden, outputs))
        blocks.append(added(body) if (inputs, stride) == (outputs, 1) else body)
        inputs = outputs
    last = normed(inputs, 576), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    logits = nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, classes)
    return Layers(*blocks, Layers(*last, *logits))


@host("densenet")
def densenet(classes: int) -> Layers:
    """Huang et al. 2017: DenseNet-BC of 22 layers, with a growth of 12."""
    growth, channels = 12, 24
    blocks: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for layer in range(9):
        if layer in (3, 6):
            blocks.append(Layers(preactivated(channels, channels // 2), nn.AvgPool2d(2)))
            channels //= 2
        new = preactivated(channels, 4 * growth), preactivated(4 * growth, growth, 3)
        blocks.append(Joined(beside, nn.Identity(), Layers(*new)))
        channels += growth
    return Layers(*blocks, head(channels, classes, nn.BatchNorm2d(channels), nn.ReLU()))


@host("squeezenet")
def squeezenet(classes: int) -> Layers:
    """Iandola et al. 2016: version 1.1 with a quarter of the channels."""

    def wide(inputs: int, outputs: int, kernel: int) -> Layers:
        return Layers(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU())

    def fire(inputs: int, narrow: int, outputs: int) -> Layers:
        both = (wide(narrow, outputs // 2, kernel) for kernel in (1, 3))
        return Layers(wide(inputs, narrow, 1), Joined(beside, *both))

    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    first = Layers(wide(3, 16, 3), pool), fire(16, 4, 32), Layers(fire(32, 4, 32), pool)
    middle = fire(32, 8, 64), Layers(fire(64, 8, 64), pool), fire(64, 12, 96), fire(96, 12, 96)
    last = fire(96, 16, 128), fire(128, 16, 128)
    logits = Layers(wide(128, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Layers(*first, *middle, *last, logits)


class Shuffled(nn.Module):
    """Half of the channels pass by, or all go two ways with a stride; then those alternate."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        half = width // 2
        self.is_half = stride == 1
        inputs = half if self.is_half else inputs
        depthwise = normed(half, half, 3, stride, groups=half)
        around = normed(inputs, inputs, 3, stride, groups=inputs), normed(inputs, half), nn.ReLU()
        self.shortcut = nn.Identity() if self.is_half else Layers(*around)
        first = normed(inputs, half), nn.ReLU(), depthwise
        self.body = Layers(*first, normed(half, half), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        passed, taken = x.chunk(2, 1) if self.is_half else (x, x)
        both = beside(self.shortcut(passed), self.body(taken))
        return both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@host("shufflenet")
def shufflenet(classes: int) -> Layers:
    """Ma et al. 2018: version 2 of half the width, with fewer units."""
    units = list[nn.Module]()
    for inputs, width in pairwise((24, 48, 96, 192)):
        units += [Shuffled(inputs, width, 2), Shuffled(width, width, 1)]
    last = head(256, classes, normed(192, 256), nn.ReLU())
    return Layers(Layers(normed(3, 24, 3), nn.ReLU()), *units, last)


class Scaled(nn.Module):
    """Channels, which stand last, each times a number that is learned."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@host("convnext")
def convnext(classes: int) -> Layers:
    """Liu et al. 2022, with widths of 16, 32 and 64."""
    blocks: list[nn.Module] = [Layers(nn.Conv2d(3, 16, 2, 2), Turned(nn.LayerNorm(16, eps=1e-6)))]
    for inputs, width in pairwise((16, 16, 32, 64)):
        if inputs != width:
            norm = Turned(nn.LayerNorm(inputs, eps=1e-6))
            blocks.append(Layers(norm, nn.Conv2d(inputs, width, 2, 2)))
        for _ in range(2):
            body = nn.LayerNorm(width, eps=1e-6), perceptron(width, 4 * width), Scaled(width)
            depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
            blocks.append(added(depthwise, Turned(*body)))
    mean = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(64, eps=1e-6)
    return Layers(*blocks, Layers(*mean, nn.Linear(64, classes)))


@host("mlp_mixer")
def mlp_mixer(classes: int) -> Layers:
    """Tolstikhin et al. 2021, 64 patches of 4x4 pixels."""

    def layer() -> nn.Module:
        tokens = added(nn.LayerNorm(32), Turned(perceptron(64, 32)))
        return Turned(tokens, added(nn.LayerNorm(32), perceptron(32, 128)))

    layers = (layer() for _ in range(4))
    mean = Turned(nn.LayerNorm(32))
    return Layers(nn.Conv2d(3, 32, 4, 4), *layers, head(32, classes, mean))


class Attention(nn.Module):
    """Attention of tokens to all, by four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.taken = nn.Linear(width, 3 * width)
        self.given = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.taken(x).chunk(3, 2))
        return self.given(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Logits by a class token before the tokens, with positions that are learned."""

    def __init__(self, width: int, num_tokens: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + num_tokens, width))
        layers = list[nn.Module]()
        for _ in range(4):
            layers.append(added(nn.LayerNorm(width), Attention(width)))
            layers.append(added(nn.LayerNorm(width), perceptron(width, 2 * width)))
        self.layers = Layers(*layers, nn.LayerNorm(width))
        self.logits = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        return self.logits(self.layers(tokens + self.positions)[:, 0])


@host("vit")
def vit(classes: int) -> Layers:
    """Dosovitskiy et al. 2021, 64 patches of 4x4 pixels."""
    return Layers(nn.Conv2d(3, 48, 4, 4), Transformer(48, 64, classes))
