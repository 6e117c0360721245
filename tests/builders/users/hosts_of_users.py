"""Hosts that a user might write, good and faulty, as a module for settings: hosts_of_users:NAME."""

import copy
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper_soa
from esper_soa.nets.model.conv import ConvBlock
from esper_soa.nets.model.parts import NARROW, Conv, Depthwise
from esper_soa.nets.model.residual import Residual
from esper_soa.nets.model.segments import HostPart

SLOTS = {  # of the good ones, to grow seeds in
    "uneven": ["r0c1", "r1c2"],
    "refined": ["r0c1", "r0c3"],
    "staged": ["r0c0", "r0c2"],
    "plain": ["r0c0", "r0c2"],
    "counting": ["r0c0", "r0c1"],
}


@esper_soa.host("uneven")
def uneven() -> tuple[HostPart, ...]:
    """Blocks that differ in kernel, width and pool."""
    return (
        ConvBlock(5, kernel=5, pool=True),
        ConvBlock(12),
        ConvBlock(9, kernel=1, pool=True),
        ConvBlock(16, kernel=7),
    )


@esper_soa.host("refined")
def refined() -> tuple[HostPart, ...]:
    """With residual segments, of which no kernels are."""
    return (
        ConvBlock(8, pool=True),
        Residual((Conv(NARROW, kernel=1), Conv(kernel=3))),
        ConvBlock(12, kernel=5, pool=True),
        Residual((Depthwise(), Conv(kernel=1))),
    )


class Unit(nn.Module):
    """A residual unit with a batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


class Head(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


@esper_soa.host("staged")
class Staged(nn.Sequential):
    """Units and a head; the pool in between has no weights."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            OrderedDict(
                stem=Unit(3, 6, 2),
                pool=nn.MaxPool2d(2),
                body=Unit(6, 10, 1),
                head=Head(10, classes),
            )
        )


@esper_soa.host("plain")
def plain(classes: int) -> nn.Module:
    """Of torch's own modules and without buffers; a segment gives flat features, and the first has
    no weights.
    """
    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, classes),
    )


@esper_soa.host("counting")
class Counting(nn.Sequential):
    """Keeps how many batches it was trained on, and the mean of its features, by assignment."""

    def __init__(self, classes: int) -> None:
        super().__init__(Average(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, classes))


class Average(nn.Module):
    mean: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * out.detach().mean((0, 2, 3))
            self.batches = self.batches + 1
        return out - self.mean[:, None, None]


# --- the faulty


def chain(classes: int, *segments: nn.Module) -> nn.Sequential:
    """These segments, four channels of 32x32 pixels, and a head."""
    return nn.Sequential(
        *segments, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
    )


def of_parts(name: str, *parts: object) -> Callable[[], tuple[object, ...]]:
    """A host `name` of these parts."""

    @esper_soa.host(name)
    def make() -> tuple[object, ...]:
        return parts

    return make


def of_modules(name: str, *segments: nn.Module) -> Callable[[int], nn.Sequential]:
    """A host `name`: the `chain` of copies of these."""

    @esper_soa.host(name)
    def make(classes: int) -> nn.Sequential:
        return chain(classes, *copy.deepcopy(segments))

    return make


empty = of_parts("empty")
headless = of_parts("headless", Residual((Conv(),)), ConvBlock(8))
lonely = of_parts("lonely", ConvBlock(8))
tiny = of_parts("tiny", *[ConvBlock(2, pool=True)] * 6)
seedlike = of_parts("seedlike", Conv(), Conv())


even = esper_soa.host("even")(lambda: (ConvBlock(8, kernel=4), ConvBlock(8)))
wider = esper_soa.host("wider")(lambda: (ConvBlock(8), Residual((Conv(NARROW),))))
vacant = esper_soa.host("vacant")(lambda: (ConvBlock(8), Residual(())))
word = esper_soa.host("word")(lambda: "chain")
bare = esper_soa.host("bare")(lambda: chain(10, nn.Conv2d(3, 4, 1)))
greedy = esper_soa.host("greedy")(lambda classes, more: chain(classes, nn.Conv2d(3, 4, more)))
short = esper_soa.host("short")(lambda classes: chain(classes + 1, nn.Conv2d(3, 4, 1)))
weightless = esper_soa.host("weightless")(
    lambda classes: nn.Sequential(nn.ReLU(), nn.AvgPool2d(8), nn.Flatten())
)
fused = esper_soa.host("fused")(
    lambda classes: nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(3072, classes)))
)
brief = esper_soa.host("brief")(
    lambda classes: nn.Sequential(OrderedDict(r0c0x=nn.Conv2d(3, 4, 1), head=Head(4, classes)))
)
flat = esper_soa.host("flat")(lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3072, classes)))
taken = esper_soa.host("taken")(
    lambda classes: nn.Sequential(OrderedDict(r0c1=nn.Conv2d(3, 4, 1), input=Head(4, classes)))
)
lazy = esper_soa.host("lazy")(
    lambda classes: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.LazyLinear(classes))
)
dropping = esper_soa.host("dropping")(
    lambda classes: nn.Sequential(
        OrderedDict(stem=nn.Conv2d(3, 4, 1), body=nn.Dropout(0.5), head=Head(4, classes))
    )
)


@esper_soa.host("random_wide")
class RandomWide(nn.Sequential):
    """Draws random numbers, and gives a class too many."""

    def __init__(self, classes: int) -> None:
        head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, classes + 1))
        super().__init__(nn.Conv2d(3, 4, 4, stride=4), nn.Dropout(), head)


@esper_soa.host("drawing_keeper")
class DrawingKeeper(RandomWide):
    """Keeps a tensor beside."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.strength = torch.ones(1)


@esper_soa.host("branching")
class Branching(nn.Module):
    """A graph, not a chain."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3)
        self.right = nn.Conv2d(3, 4, 3)


@esper_soa.host("skipping")
class Skipping(nn.Sequential):
    """A chain with a forward pass of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 1), Head(4, classes))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


pointwise = nn.Conv2d(4, 4, 1)
tied = of_modules("tied", nn.Conv2d(3, 4, 1), pointwise, nn.Sequential(pointwise))
frozen = of_modules("frozen", nn.Conv2d(3, 4, 1).requires_grad_(False))
broken = of_modules("broken", nn.Conv2d(4, 4, 1))
crowd = of_modules("crowd", nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
# with a buffer that no state_dict holds; with a tensor that is none
noisy = nn.BatchNorm2d(4)
noisy.register_buffer("noise", torch.zeros(4), persistent=False)
passing = of_modules("passing", nn.Conv2d(3, 4, 1), noisy)
scaled = nn.Conv2d(3, 4, 1)
scaled.scale = torch.ones(4)  # type: ignore[assignment]
hoarding = of_modules("hoarding", scaled)


class Halved(nn.Conv2d):
    """Gives fewer channels in training."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out[:, :2] if self.training else out


class Deciding(nn.Conv2d):
    """Decides by a number, which has no one value for several networks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() > 0 else super().forward(-x)


moody = of_modules("moody", Halved(3, 4, 1))
reading = of_modules("reading", Deciding(3, 4, 1))


# --- what only a closer look finds faulty


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - 100)


boundless = nn.Conv2d(3, 4, 1)
nn.init.constant_(boundless.weight, float("inf"))
infinite = of_modules("infinite", boundless)
undefined = of_modules("undefined", nn.Conv2d(3, 4, 1), Logarithm(), nn.BatchNorm2d(4))


@esper_soa.host("chance")
def chance(classes: int) -> nn.Module:
    """Begins with numbers that no generator of torch gives."""
    chance_drawn.append(float(len(chance_drawn)))
    conv = nn.Conv2d(3, 4, 1)
    nn.init.constant_(conv.weight, chance_drawn[-1])
    return chain(classes, conv)


chance_drawn: list[float] = []


@esper_soa.host("deaf")
class Deaf(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 1), Fixed(), nn.Flatten())


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1).detach().repeat(1, 3, 1, 1)[:, :10]


def unmarked() -> tuple[HostPart, ...]:
    return ConvBlock(8), ConvBlock(8)
