"""Ways to compute a convolution of n networks with torch, and which of them is taken for which
shape.

No way is the quickest for all shapes on a GPU: grouped convolutions suffer from narrow groups and
from their layout, matrix products of patches from their traffic where images are large. The setting
compute.convolutions chooses; what it chose is held by the layers (layers.py) of the engine that it
was chosen for.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# timings per way and shape, of which the quickest counts; one more before them pays for what is
# made once
TRIALS = 5
MOST_PATCHES = 1 << 28  # bytes of patches beyond which no matrix product is tried

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Shape = tuple[object, ...]


def _grouped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = None if bias is None else bias.reshape(-1)
    return F.conv2d(
        x,
        weight.flatten(0, 1),
        flat,
        padding=weight.shape[-1] // 2,
        groups=x.shape[1] // weight.shape[2],
    )


def _planes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The grouped convolution in memory where a channel is a plane."""
    out = _grouped(x.contiguous(), weight.contiguous(), bias)
    return out.contiguous(memory_format=torch.channels_last)


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Patches [n, B*H*W, I*k*k] times weights, as one batched matrix product."""
    nets, outputs, inputs, kernel, _ = weight.shape
    batch, _, height, width = x.shape
    around = kernel // 2
    pixels = (
        F.pad(x, (around, around, around, around)).permute(0, 2, 3, 1).unflatten(3, (nets, inputs))
    )
    windows = pixels.unfold(1, kernel, 1).unfold(2, kernel, 1)  # [B, H, W, n, I, k, k]
    patches = windows.permute(3, 0, 1, 2, 4, 5, 6).reshape(nets, batch * height * width, -1)
    columns = weight.flatten(2).transpose(1, 2)
    out = (
        torch.bmm(patches, columns)
        if bias is None
        else torch.baddbmm(bias.unsqueeze(1), patches, columns)
    )
    by_pixel = out.view(nets, batch, height, width, outputs).permute(1, 2, 3, 0, 4).flatten(3)
    return by_pixel.permute(0, 3, 1, 2)


WAYS: dict[str, Way] = {"channels_last": _grouped, "planes": _planes, "matmul": _matmul}


class Timer:
    """Ways by shape, the quickest as measured when the shape was first met."""

    def __init__(self, seconds: Callable[[Callable[[], object]], float]) -> None:
        """seconds: how long a call takes on the device."""
        self.seconds = seconds
        self.found: dict[Shape, str] = {}

    def way(self, x: Tensor, weight: Tensor) -> str:
        """The way for these shapes; forward and backward count where x or weight needs a
        gradient.
        """
        shape = (*x.shape, *weight.shape, x.dtype, x.requires_grad, weight.requires_grad)
        if shape not in self.found:
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # nothing can be timed now; a captured step has run before, with all its shapes
                return "channels_last"
            self.found[shape] = self._quickest(
                x.detach(), weight.detach(), (x.requires_grad, weight.requires_grad)
            )
        return self.found[shape]

    def _quickest(self, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> str:
        leaves = [
            part.clone().requires_grad_(needs)
            for part, needs in zip((x, weight), wanted, strict=True)
        ]

        def once(way: Way) -> None:
            with torch.enable_grad():
                out = way(leaves[0], leaves[1], None)
                if any(wanted):
                    torch.autograd.grad(
                        out, [leaf for leaf in leaves if leaf.requires_grad], torch.ones_like(out)
                    )

        patches = x.numel() * weight.shape[-1] ** 2 * x.element_size()
        times = {}
        for name, way in WAYS.items():
            if name != "matmul" or patches <= MOST_PATCHES:
                once(way)
                times[name] = min(self.seconds(partial(once, way)) for _ in range(TRIALS))
        return min(times, key=lambda name: times[name])


def device_seconds(call: Callable[[], object]) -> float:
    """Seconds that the current CUDA device takes for `call`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Convolutions(NamedTuple):
    """Which way is taken: one for all shapes, or the quickest of each, by `timer` (None: no
    timing).
    """

    way: str = "channels_last"
    timer: Timer | None = None

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Same-padded convolution of x [B, n*I, H, W] with weight [n, O, I, k, k] and bias [n, O]
        -> [B, n*O, H, W].

        x may be [B, I, H, W], the same images for every network: then it is one dense convolution.
        """
        if x.shape[1] != weight.shape[0] * weight.shape[2]:
            return _grouped(x, weight, bias)
        return WAYS[self.way if self.timer is None else self.timer.way(x, weight)](x, weight, bias)


def choose_convolutions(setting: str, device: torch.device) -> Convolutions:
    """What compute.convolutions stands for on `device`; `auto` times every shape on a GPU when it
    is first met.

    On a CPU `auto` is channels_last, where planes take two to three times as long.
    """
    if setting != "auto":
        return Convolutions(setting)
    return Convolutions(timer=Timer(device_seconds)) if device.type == "cuda" else Convolutions()
