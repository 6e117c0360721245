"""Every way to compute a convolution gives the same, and the quickest of a shape is taken."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper_soa.config import CONVOLUTIONS
from esper_soa.nets import convolutions
from esper_soa.nets.convolutions import WAYS, Timer, choose_convolutions
from esper_soa.nets.layers import Layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


def layers(way: str, device: torch.device = CPU) -> Layers:
    return Layers(choose_convolutions(way, device))


def given(nets: int, kernel: int, bias: bool) -> list[Tensor]:
    """x in channels_last, weight, and bias where wanted; float64."""
    g = torch.Generator().manual_seed(nets + kernel)
    shapes = [(2, nets * 3, 5, 6), (nets, 4, 3, kernel, kernel), (nets, 4)][: 2 + bias]
    x, *others = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return [x.contiguous(memory_format=torch.channels_last), *others]


def results(way: str, inputs: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of all inputs, of a loss in which every output counts
    differently.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = layers(way).conv2d(*leaves)
    assert out.is_contiguous(memory_format=torch.channels_last)
    pull = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, pull)]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "channels_last"])
@pytest.mark.parametrize("nets", [1, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_equals_the_grouped_convolution(
    way: str, nets: int, kernel: int, bias: bool
) -> None:
    inputs = given(nets, kernel, bias)
    for ours, wanted in zip(results(way, inputs), results("channels_last", inputs), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_images_that_networks_share_stay_one_dense_convolution() -> None:
    x = torch.randn(2, 3, 5, 6)
    weight = torch.randn(4, 2, 3, 3, 3)
    apart = torch.cat([torch.conv2d(x, one, padding=1) for one in weight], dim=1)
    for way in CONVOLUTIONS:
        torch.testing.assert_close(layers(way).conv2d(x, weight), apart)


class Clock:
    """Says in turn how long the ways take, and does what it is to time."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.order = [seconds[name] for name in WAYS for _ in range(convolutions.TRIALS)]
        self.read = 0

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        self.read += 1
        return self.order[(self.read - 1) % len(self.order)]


@pytest.mark.parametrize("quickest", list(WAYS))
def test_the_quickest_way_is_taken_and_every_shape_timed_once(quickest: str) -> None:
    clock = Clock({name: 1.0 if name == quickest else 2.0 for name in WAYS})
    timer = Timer(clock)
    x, weight = given(2, 3, False)
    leaf = weight.clone().requires_grad_()
    for _ in range(2):
        assert timer.way(x, weight) == quickest
    assert clock.read == len(WAYS) * convolutions.TRIALS
    assert timer.way(x, leaf) == quickest  # with a backward pass it is another matter
    assert timer.way(x[:1], weight) == quickest
    assert clock.read == 3 * len(WAYS) * convolutions.TRIALS
    assert leaf.grad is None


def test_patches_that_fill_the_memory_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = given(2, 3, False)
    monkeypatch.setattr(convolutions, "MOST_PATCHES", x.numel() * 9 * 8 - 1)
    clock = Clock({"channels_last": 2.0, "planes": 3.0, "matmul": 1.0})
    assert Timer(clock).way(x, weight) == "channels_last"
    assert clock.read == 2 * convolutions.TRIALS


def test_on_a_cpu_nothing_is_timed() -> None:
    assert choose_convolutions("auto", CPU).timer is None
    assert choose_convolutions("matmul", CPU).way == "matmul"
    assert set(CONVOLUTIONS) == {*WAYS, "auto"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_times_its_ways() -> None:
    tuned = layers("auto", DEVICE)
    x, weight = (tensor.float().to(DEVICE) for tensor in given(2, 3, False))
    wanted = layers("channels_last").conv2d(x.cpu(), weight.cpu())
    torch.testing.assert_close(tuned.conv2d(x, weight).cpu(), wanted, rtol=1e-3, atol=1e-3)
    assert tuned.convolutions.timer is not None
    assert set(tuned.convolutions.timer.found.values()) <= set(WAYS)
