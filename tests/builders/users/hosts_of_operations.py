"""Hosts of plain modules that the native kernels take, and some that they do not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hosts_of_users import Head
from torch import Tensor, nn

from esper_soa import blueprint, host

GROUP = 8  # channels of a group
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    F.hardswish,
    F.hardsigmoid,
    F.relu6,
)


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is pointwise where sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            point = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(point, nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(self.relu(self.first_norm(self.first(x)))))
        return self.relu(y + self.shortcut(x))


def stem(channels: int) -> nn.Sequential:
    conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())


@host("resnet")
def resnet(classes: int) -> nn.Sequential:
    return nn.Sequential(stem(8), Residual(8, 8, 1), Residual(8, 20, 2), Head(20, classes))


@host("vgg")
def vgg(classes: int) -> nn.Sequential:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(block(3, 6), block(6, 16), block(16, 20), Head(20, classes))


@host("separable")
def separable(classes: int) -> nn.Sequential:
    def block(inputs: int, outputs: int, stride: int, kernel: int) -> nn.Sequential:
        depth = nn.Conv2d(inputs, inputs, kernel, stride, kernel // 2, groups=inputs, bias=False)
        point = nn.Conv2d(inputs, outputs, 1, bias=False)
        norms = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.2)
        return nn.Sequential(depth, norms[0], nn.SiLU(), point, norms[1], nn.Hardswish())

    return nn.Sequential(stem(12), block(12, 16, 2, 3), block(16, 20, 1, 5), Head(20, classes))


@host("grey")
def grey(classes: int) -> nn.Sequential:
    grouped = nn.Conv2d(6, 12, 3, 2, 1, groups=3, bias=False)
    first = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
    return nn.Sequential(first, grouped, nn.BatchNorm2d(12), Head(12, classes))


class Sums(nn.Module):
    """An operation that the kernels do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(3)


@host("sums")
def sums(classes: int) -> nn.Sequential:
    return nn.Sequential(stem(8), Sums(), Head(8, classes))


class Doubled(nn.Module):
    """A module that computes something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x).relu() if self.training else x.tanh()


@host("doubled")
def doubled(classes: int) -> nn.Sequential:
    return nn.Sequential(stem(8), Doubled(), Head(8, classes))


class Idle(nn.Module):
    """A module with a parameter that takes part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.idle = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


@host("idle")
def idle(classes: int) -> nn.Sequential:
    return nn.Sequential(Idle(), Head(8, classes))


class Sum(nn.Module):
    """Adds to features what comes of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


@host("identity")
def identity(classes: int) -> nn.Sequential:
    return nn.Sequential(stem(8), nn.Identity(), Sum(8), nn.Identity(), Head(8, classes))


class Weighted(nn.Module):
    """x times a number of each channel, made of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(channels, 5)
        self.wide = nn.Conv2d(5, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.relu(self.narrow(x.mean((2, 3))))
        return x * torch.sigmoid(self.wide(narrow.unsqueeze(2).unsqueeze(3)))


class Mixed(nn.Module):
    """Norms and activations by themselves, depthwise convolutions, pools."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.group_norm = nn.GroupNorm(2, channels)
        self.wide = nn.Conv2d(channels, channels, 5, padding=2, groups=channels, bias=False)
        both = 2 * channels
        self.depthwise = nn.Conv2d(both, both, 3, stride=2, padding=1, groups=both)
        self.grouped = nn.Conv2d(both, both, 3, padding=1, groups=both // GROUP)
        self.patches = nn.Conv2d(both, both, 2, stride=2)
        self.points = nn.ModuleList(nn.Conv2d(both, both, 1) for _ in ACTIVATIONS)
        self.weighted = Weighted(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.weighted(F.silu(self.norm(x)) + F.gelu(self.group_norm(x)))
        x = torch.cat([F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(self.wide(x), 2)], 1)
        x = self.grouped(x)
        x = self.depthwise(x) + self.patches(x)
        for point, activation in zip(self.points, ACTIVATIONS, strict=True):
            x = x + activation(point(x))
        return x


@host("mixed")
def mixed(classes: int) -> nn.Sequential:
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(384, 7), nn.Tanh(), nn.Linear(7, classes, bias=False)
    )
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 12, 4, 2, 1), nn.GELU()), Mixed(12), head)


@blueprint("weighted")
class WeightedNorm(Weighted):
    """A seed of norms, products and one-pixel layers."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@blueprint("beside")
class Beside(nn.Module):
    """A seed of convolutions side by side, added to what it is given."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.point = nn.Conv2d(8 + channels, channels, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([F.relu(self.norm(self.conv(x))), self.depthwise(x)], 1)
        return F.gelu(self.point(both) + x)


class Tokens(nn.Module):
    """Linear layers of the channels of each pixel, and of the pixels of each channel."""

    def __init__(self, channels: int, pixels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.pixels = nn.Sequential(nn.Linear(pixels, 35), nn.GELU(), nn.Linear(35, pixels))
        self.last_norm = nn.LayerNorm(channels)
        self.channels = nn.Sequential(nn.Linear(channels, 20), nn.GELU(), nn.Linear(20, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.pixels(self.norm(y).transpose(1, 2)).transpose(1, 2)
        last = self.last_norm(y.transpose(1, 2).reshape(x.shape).permute(0, 2, 3, 1))
        return x + self.channels(last).permute(0, 3, 1, 2)


class TokenHead(nn.Module):
    """Logits by the mean of the tokens."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.flatten(2).transpose(1, 2)).mean(1))


@blueprint("tokens")
class TokenNorm(nn.Module):
    """A seed with a norm of the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


@host("mixer")
def mixer(classes: int) -> nn.Sequential:
    patches = nn.Conv2d(3, 12, 4, 4)
    return nn.Sequential(patches, Tokens(12, 64), Tokens(12, 64), TokenHead(12, classes))


class Moved(nn.Module):
    """Parameters and constants beside features, some channels, and channels that alternate."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))
        self.positions = nn.Parameter(torch.rand(1, channels, side, side))
        self.factor = nn.Parameter(torch.rand(()))
        self.conv = nn.Conv2d(channels // 2, channels // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        first, second = (self.scale * x + self.positions).chunk(2, 1)
        x = torch.cat([first, F.gelu(self.conv(second))], 1)
        x = x.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)
        return (1 - x / 2) * self.factor - 3


@host("moved")
def moved(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), Moved(12, 8), Head(12, classes))


class Attention(nn.Module):
    """Attention by heads, of layers of their own or of a joint one."""

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.Linear(channels, 3 // layers * channels) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (x.shape[1], self.heads, -1)
        if len(self.layers) > 1:
            taken = [layer(x).unflatten(2, heads[1:]).transpose(1, 2) for layer in self.layers]
        else:
            taken = list(
                self.layers[0](x).reshape(len(x), heads[0], 3, *heads[1:]).permute(2, 0, 3, 1, 4)
            )
        return F.scaled_dot_product_attention(*taken).transpose(1, 2).flatten(2)


class Attending(nn.Module):
    """Attention of pixels and of tokens before them."""

    def __init__(self, channels: int, heads: int, pixels: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.rand(1, 2, channels))
        self.positions = nn.Parameter(torch.rand(1, 2 + pixels, channels))
        self.norm = nn.LayerNorm(channels)
        self.split = Attention(channels, heads, 3)
        self.joint = Attention(channels, heads, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.tokens.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        tokens = tokens + self.positions
        tokens = tokens + self.joint(self.norm(tokens + self.split(tokens)))
        return tokens[:, 2:].transpose(1, 2).reshape(x.shape)


@host("attending")
def attending(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 20, 8, 8), Attending(20, 2, 16), Head(20, classes))


@blueprint("attended")
class Attended(Attending):
    """A seed of attention, its own parameters before the tokens and beside the result."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, 2, 0)
        self.positions = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
