"""Host, seeds and gate of one env as ordinary nn.Modules, written as plainly as possible.

The oracle that the stacked networks of esper_soa/nets are tested against, and the opponent of the
benchmarks; it shares no code with them. `flat` and `load_flat` move weights in and out as one
vector, in the order of `parameters()`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_soa.config.nets import IMAGE_CHANNELS, TaskConfig
from esper_soa.vocabulary import Blend, Blueprint

FEATURE_DIMS = 3  # of features behind the batch


class FlatModule(nn.Module):
    """A module whose parameters can be read and written as one vector, each in row-major order."""

    def flat(self) -> Tensor:
        """Copy of all parameters as one vector, in registration order."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()])

    def load_flat(self, vector: Tensor) -> None:
        """Copy `vector` into the parameters; raises ValueError when its length is not theirs."""
        if vector.shape != (self.num_parameters(),):
            raise ValueError(
                f"{type(self).__name__} takes {self.num_parameters()} numbers, got "
                f"{tuple(vector.shape)}"
            )
        start = 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(vector[start : start + parameter.numel()].view(parameter.shape))
                start += parameter.numel()

    def num_parameters(self) -> int:
        """Number of scalars in `flat()`."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flat_statistics(self) -> Tensor:
        """Copy of running means and variances as one vector, empty where there are none."""
        return torch.cat([self.flat()[:0], *self._statistics()])

    def load_flat_statistics(self, vector: Tensor) -> None:
        """Copy `vector`, in the order of `flat_statistics`, into the running statistics."""
        rows = self._statistics()
        for row, values in zip(rows, vector.split([row.numel() for row in rows]), strict=True):
            row.copy_(values)

    def _statistics(self) -> list[Tensor]:
        return [
            row
            for name, row in self.named_buffers()
            if name.endswith(("running_mean", "running_var"))
        ]


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with the largest number of groups that leaves 16 channels each, or divides."""
    divisors = [groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0]
    wide = [groups for groups in divisors if channels // groups >= 16]
    return nn.GroupNorm((wide or divisors)[0], channels)


def conv(channels_in: int, channels_out: int, kernel_size: int, groups: int = 1) -> nn.Conv2d:
    """Convolution without bias that keeps height and width."""
    return nn.Conv2d(
        channels_in, channels_out, kernel_size, padding=kernel_size // 2, groups=groups, bias=False
    )


class Noop(FlatModule):
    """Returns its input; never germinated, but part of the recorded cases."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Norm(FlatModule):
    """x + tanh(scale) (GN(x) - x). Order: scale [1], GN weight, GN bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.norm = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        # torch's backward of GroupNorm on a CPU (2.13, channels_last) crashes where its input needs
        # no gradient.
        inner = x if x.requires_grad else x.detach().requires_grad_()
        return x + torch.tanh(self.scale) * (self.norm(inner) - x)


class Attention(FlatModule):
    """x times a factor per channel. Order: W1 [r, C], W2 [C, r], b2 [C]; r = max(1, C//4)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        reduced = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, reduced, bias=False)
        self.excite = nn.Linear(reduced, channels)
        nn.init.zeros_(self.excite.weight)
        nn.init.constant_(self.excite.bias, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3))))))
        return x * factor[:, :, None, None]


class Depthwise(FlatModule):
    """x + relu(GN(pointwise(depthwise(x)))). Order: [C, 1, 3, 3], [C, C, 1, 1], GN."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = conv(channels, channels, 3, groups=channels)
        self.pointwise = conv(channels, channels, 1)
        self.norm = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.pointwise(self.depthwise(x))))


class Bottleneck(FlatModule):
    """x + GN(up(relu(mid(relu(down(x)))))), with up = 0 at the start and b = max(8, C//4).

    Order: down [b, C, 1, 1], mid [b, b, 3, 3], up [C, b, 1, 1], GN weight, GN bias.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        width = max(8, channels // 4)
        self.down = conv(channels, width, 1)
        self.mid = conv(width, width, 3)
        self.up = conv(width, channels, 1)
        self.norm = group_norm(channels)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(F.relu(self.mid(F.relu(self.down(x))))))


class ConvSmall(FlatModule):
    """x + relu(GN(conv1x1(x))). Order: conv [C, C, 1, 1], GN weight, GN bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv(channels, channels, 1)
        self.norm = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvLight(FlatModule):
    """x + relu(GN(conv3x3(x))). Order: conv [C, C, 3, 3], GN weight, GN bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv(channels, channels, 3)
        self.norm = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvHeavy(FlatModule):
    """x plus two rounds of relu(GN(conv3x3(.))). Order: conv, GN weight, GN bias of each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = conv(channels, channels, 3)
        self.norm1 = group_norm(channels)
        self.conv2 = conv(channels, channels, 3)
        self.norm2 = group_norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return x + F.relu(self.norm2(self.conv2(inner)))


SEEDS: dict[
    int, type[Noop | Norm | Attention | Depthwise | Bottleneck | ConvSmall | ConvLight | ConvHeavy]
] = {
    Blueprint.NOOP: Noop,
    Blueprint.CONV_LIGHT: ConvLight,
    Blueprint.ATTENTION: Attention,
    Blueprint.NORM: Norm,
    Blueprint.DEPTHWISE: Depthwise,
    Blueprint.BOTTLENECK: Bottleneck,
    Blueprint.CONV_SMALL: ConvSmall,
    Blueprint.CONV_HEAVY: ConvHeavy,
}


def make_seed(blueprint: int, channels: int, blend: int) -> FlatModule:
    """A new seed, initialised from torch's global random state.

    MULTIPLY wants a last layer of zeros, which is given where gradients stay alive: the bottleneck
    has it anyway, attention loses its bias as well.
    """
    seed = SEEDS[blueprint](channels)
    if blend == Blend.MULTIPLY and isinstance(seed, Attention):
        nn.init.zeros_(seed.excite.bias)
    return seed


class Gate(FlatModule):
    """Amplitude in (0, 1) per image. Order: W1 [H, C], b1, W2 [1, H], b2; H = max(8, C//4)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(8, channels // 4)
        self.inner = nn.Linear(channels, hidden)
        self.outer = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, 1, 1, 1]."""
        return torch.sigmoid(self.outer(F.relu(self.inner(x.mean(dim=(2, 3))))))[:, :, None, None]


class Graft(NamedTuple):
    """A running seed as one forward pass sees it."""

    seed: nn.Module
    gate: FlatModule | None  # needed by GATE only
    blend: int
    alpha: float | Tensor  # one number, or one per sample [B, 1, ...]
    incubating: bool  # TRAINING: the host's features pass unchanged, the seed gets their gradient
    detached: bool  # the seed's gradient does not reach the layers before it


def graft_forward(graft: Graft, h: Tensor) -> Tensor:
    """Host features [B, ...] after the seed has acted on them."""
    x = h.detach() if graft.detached else h
    s = graft.seed(x).to(h.dtype)  # autocast leaves norms in float32
    if graft.incubating:
        return h + (s - s.detach())  # value of h, gradient of h and of s
    if graft.blend == Blend.MULTIPLY:
        return h * (1 + graft.alpha * torch.tanh(s - x))
    if graft.blend == Blend.GATE:
        if graft.gate is None:
            raise ValueError("a seed with blend GATE needs a gate network")
        return torch.lerp(h, s, (graft.alpha * graft.gate(x)).to(h.dtype))
    return torch.lerp(
        h, s, graft.alpha.to(h.dtype) if isinstance(graft.alpha, Tensor) else graft.alpha
    )


class Block(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, channels_in: int, channels_out: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = conv(channels_in, channels_out, kernel_size)
        self.bn = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in, H, W] to [B, out, H, W]."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Host(FlatModule):
    """Blocks with a slot before (r0c*) and after (r1c*) each pool, global average pool, classifier.

    Order of `flat`: conv weight, BatchNorm weight, BatchNorm bias of every block, classifier
    weight, classifier bias.
    """

    def __init__(self, task: TaskConfig) -> None:
        super().__init__()
        channels = [IMAGE_CHANNELS] + [task.base_channels * 2**i for i in range(task.num_blocks)]
        self.blocks = nn.ModuleList(
            Block(channels[i], channels[i + 1], task.kernel_size) for i in range(task.num_blocks)
        )
        self.classifier = nn.Linear(channels[-1], task.classes)
        self.num_pools = task.num_pools

    def forward(self, x: Tensor, grafts: Mapping[str, Graft]) -> Tensor:
        """Logits [B, classes] of images [B, 3, 32, 32]; `grafts`: seeds by slot name."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if f"r0c{i}" in grafts:
                x = graft_forward(grafts[f"r0c{i}"], x)
            if i < self.num_pools:
                x = F.max_pool2d(x, 2)
                if f"r1c{i}" in grafts:
                    x = graft_forward(grafts[f"r1c{i}"], x)
        return self.classifier(x.mean(dim=(2, 3)))
