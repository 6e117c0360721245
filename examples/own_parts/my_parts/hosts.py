"""Two hosts: one of the package's segments, which runs in every engine, and modules of torch, which
torch runs.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

import esper_soa
from esper_soa import ConvBlock, HostPart


@esper_soa.host("funnel")
def funnel() -> tuple[HostPart, ...]:
    """A large kernel first and a pointwise one last; slots r0c0 to r0c2, and r1c0 and r1c1 behind
    the pools.
    """
    return ConvBlock(8, kernel=5, pool=True), ConvBlock(16, pool=True), ConvBlock(24, kernel=1)


class Unit(nn.Module):
    """A residual unit (He et al. 2016, Deep residual learning) that halves height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, C, H, W] to [B, C', H / 2, W / 2]."""
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


@esper_soa.host("residual")
class Residual(nn.Sequential):
    """Images [B, 3, 32, 32] to logits; seeds may stand behind stem and body, in the slots r0c0 and
    r0c1.
    """

    def __init__(self, classes: int) -> None:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
        super().__init__(OrderedDict(stem=Unit(3, 8), body=Unit(8, 16), head=head))
