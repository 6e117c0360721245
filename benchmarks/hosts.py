"""Hosts of users, as plain modules, for the work u: the engine beside loops over the same."""

from torch import Tensor, nn
from torch.nn import functional as F

from esper_soa import host


def normed(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is pointwise where there is a stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = normed(inputs, outputs, 3, stride)
        self.last = normed(outputs, outputs, 3)
        self.shortcut = normed(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.last(F.relu(self.first(x))) + self.shortcut(x))


def network(classes: int, *body: nn.Module) -> nn.Sequential:
    mean = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Sequential(mean, nn.Flatten(), nn.Linear(64, classes)))


@host("resnet8")
def resnet8(classes: int) -> nn.Sequential:
    stem = nn.Sequential(normed(3, 16, 3), nn.ReLU())
    blocks = Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)
    return network(classes, stem, *blocks)


@host("separable")
def separable(classes: int) -> nn.Sequential:
    body = [nn.Sequential(normed(3, 16, 3), nn.SiLU())]
    for inputs, outputs, stride in ((16, 32, 2), (32, 64, 1), (64, 64, 2)):
        depthwise = normed(inputs, inputs, 3, stride, groups=inputs)
        body.append(nn.Sequential(depthwise, nn.SiLU(), normed(inputs, outputs, 1), nn.SiLU()))
    return network(classes, *body)


@host("resnet20")
def resnet20(classes: int) -> nn.Sequential:
    stem = nn.Sequential(normed(3, 16, 3), nn.ReLU())
    stages = []
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        first = Residual(inputs, outputs, stride)
        stages.append(nn.Sequential(first, *(Residual(outputs, outputs, 1) for _ in range(2))))
    return network(classes, stem, *stages)


@host("vgg")
def vgg(classes: int) -> nn.Sequential:
    body = []
    for inputs, outputs, pooled in ((3, 16, 0), (16, 16, 1), (16, 32, 1), (32, 64, 0), (64, 64, 1)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        body.append(nn.Sequential(conv, nn.ReLU(), *[nn.MaxPool2d(2)] * pooled))
    return network(classes, *body)


class Mixing(nn.Module):
    """Perceptrons over the 64 tokens, then over their 64 channels, each beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.tokens, self.channels = (
            nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 64))
            for hidden in (64, 128)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed = self.tokens(self.norms[0](tokens).transpose(1, 2)).transpose(1, 2)
        tokens = tokens + mixed
        return (tokens + self.channels(self.norms[1](tokens))).transpose(1, 2).unflatten(2, (8, 8))


@host("mixer")
def mixer(classes: int) -> nn.Sequential:
    return network(classes, nn.Conv2d(3, 64, 4, 4), Mixing(), Mixing())
