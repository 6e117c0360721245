"""Two blueprints: one of the package's parts, which runs in every engine, and an nn.Module, which
runs in torch.
"""

import torch
from torch import Tensor, nn

import esper_soa
from esper_soa import NARROW, Conv, Part


@esper_soa.blueprint("twin")
def twin() -> tuple[Part, ...]:
    """x + two convolutions, narrow in between; each with group norm and ReLU."""
    return Conv(NARROW, kernel=1), Conv()


@esper_soa.blueprint("mixer")
class Mixer(nn.Module):
    """x + a mix of every pixel with the means of its row and of its column, features [B, C, H,
    W].
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3 * channels, channels, kernel_size=1)
        self.strength = nn.Parameter(torch.full((channels, 1, 1), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(3, keepdim=True).expand_as(x)
        columns = x.mean(2, keepdim=True).expand_as(x)
        return x + self.strength * torch.tanh(self.mix(torch.cat([x, rows, columns], dim=1)))
