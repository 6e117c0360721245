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
