"""The native kernels equal the plain torch functions that they stand in for, and say so where they cannot run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from esper_soa.errors import SettingError
from esper_soa.nets import batched, data
from esper_soa.nets.config import TaskConfig
from esper_soa.nets.datasets import ImageSet
from esper_soa.nets.engines.cpu import block, images
from esper_soa.nets.engines.cpu.layers import NativeLayers, takes
from esper_soa.nets.engines.cpu.library import LANES
from esper_soa.nets.engines.cpu.support import choose_native
from esper_soa.nets.forward import seed_added, seed_forward
from esper_soa.nets.layers import PLAIN, Layers
from esper_soa.nets.model.blueprints import BLUEPRINTS, Architecture, seed_table
from esper_soa.nets.model.parts import Conv
from esper_soa.nets.sgd import LearningRates, rules_of
from esper_soa.vocabulary import Blueprint

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
ROUNDING = 1e-5
NATIVE = NativeLayers()


class Case(NamedTuple):
    """Sizes of a block."""

    nets: int
    inputs: int
    outputs: int
    size: int
    kernel: int = 3
    pooled: bool = True
    batch: int = 2


@contextmanager
def computed_by(native: bool, *kernels: str) -> Iterator[Layers]:
    """Native or plain layers; and that these kernels were called, or none, so that torch is not compared with torch."""
    with torch.autograd.profiler.profile() as profiler:
        yield NATIVE if native else PLAIN
    called = {event.name for event in profiler.function_events or [] if event.name.startswith("native::")}
    assert called == ({f"native::{kernel}" for kernel in kernels} if native else set())


CASES = [
    Case(1, 3, 8, 8), Case(2, 8, 16, 8), Case(3, 3, 12, 8, pooled=False), Case(2, 12, 5, 4, kernel=1),
    Case(2, 16, 32, 8, batch=3), Case(2, 8, 8, 32, pooled=False), Case(1, 1, 1, 6, kernel=5), Case(2, 32, 8, 16),
    Case(1, 64, 64, 4, pooled=False), Case(1, 24, 8, 10),
    Case(2, 8, 16, 2, pooled=False), Case(1, 8, 24, 7, pooled=False),
]  # fmt: skip


def draw(case: Case) -> dict[str, Tensor]:
    """Everything that a block takes, in float64, of unit scale."""
    g = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, fan_in = case.nets, case.inputs * case.kernel**2
    out = case.size // 2 if case.pooled else case.size
    return {
        "x": normal(case.batch, n * case.inputs, case.size, case.size).contiguous(memory_format=torch.channels_last),
        "weight": normal(n, case.outputs, case.inputs, case.kernel, case.kernel) / fan_in**0.5,
        "scale": 1 + 0.3 * normal(n, case.outputs),
        "shift": 0.3 * normal(n, case.outputs),
        "mean": normal(n * case.outputs),
        "variance": normal(n * case.outputs).square(),
        "gradient": normal(case.batch, n * case.outputs, out, out),
    }


def train(given: dict[str, Tensor], pooled: bool, native: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output, gradients of x, weight, scale and shift, and the running statistics."""
    held = {name: value.to(dtype, copy=True) for name, value in given.items()}
    leaves = [held[name].requires_grad_() for name in ("x", "weight", "scale", "shift")]
    running = held["mean"], held["variance"]
    x, weight, norm = leaves[0], leaves[1], (leaves[2], leaves[3])
    with computed_by(native, "block_train", "block_backward"):
        if native:  # past layers.py, which leaves narrow layers to torch
            moving = block.Statistics(*running, batched.BATCH_NORM_MOMENTUM, batched.NORM_EPS)
            out = block.train_block(x, weight, norm, moving, pooled)
        else:
            out = PLAIN.train_block(x, weight, norm, running, pooled)
        return [out.detach(), *torch.autograd.grad(out, leaves, held["gradient"]), *running]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = ROUNDING) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())), index


@pytest.mark.parametrize("case", CASES)
def test_a_training_block_and_its_gradients_equal_torch(case: Case) -> None:
    given = draw(case)
    ours = train(given, case.pooled, native=True)
    assert_close(ours, train(given, case.pooled, native=False))
    assert_close(ours, train(given, case.pooled, native=False, dtype=torch.float64), 3e-6)


@pytest.mark.parametrize(("outputs", "taken"), [(8, True), (4, False)])
def test_layers_narrower_than_a_vector_train_in_torch(outputs: int, taken: bool) -> None:
    x, weight = torch.randn(2, 3, 4, 4), torch.randn(1, outputs, 3, 3, 3).requires_grad_()
    norm = torch.ones(1, outputs), torch.zeros(1, outputs)
    out = NATIVE.train_block(x, weight, norm, (torch.zeros(outputs), torch.ones(outputs)), True)
    assert out.grad_fn is not None
    assert ("TrainBlock" in out.grad_fn.name()) == taken


def test_a_pool_within_the_block_and_one_behind_it_are_the_same_to_the_bit() -> None:
    # which of the two is used depends on the slots of other networks of a chunk, and no network may notice those
    given = draw(Case(2, 3, 8, 32, batch=8))
    given["shift"] += 3e4  # coarse floats: many values become equal only behind the norm
    given["scale"][:, 0] *= -1  # and there a channel's order may turn round
    together = train(given, True, native=True)
    held = {name: value.to(torch.float32, copy=True) for name, value in given.items()}
    leaves = [held[name].requires_grad_() for name in ("x", "weight", "scale", "shift")]
    running = held["mean"], held["variance"]
    out = NATIVE.max_pool(NATIVE.train_block(leaves[0], leaves[1], (leaves[2], leaves[3]), running, False))
    apart = [out.detach(), *torch.autograd.grad(out, leaves, held["gradient"]), *running]
    for index, (one, other) in enumerate(zip(together, apart, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_folded_block_equals_torch(case: Case, shared: bool) -> None:
    given = {name: value.float() for name, value in draw(case).items()}
    x = given["x"][:, : case.inputs].contiguous(memory_format=torch.channels_last) if shared else given["x"]
    both = []
    for native in (True, False):
        with computed_by(native, "block_infer") as layers, torch.no_grad():
            both.append([layers.infer_block(x, given["weight"], given["shift"], case.pooled)])
    assert_close(*both)


def test_equal_pixels_send_their_gradient_to_the_first_as_torch_does() -> None:
    given = draw(Case(2, 3, 8, 4, kernel=1))
    given["x"] = given["x"][:, :, ::2, ::2].repeat_interleave(2, 2).repeat_interleave(2, 3)  # four equals per window
    assert_close(train(given, True, native=True), train(given, True, native=False))


def test_a_nan_in_one_network_stays_there_and_spreads_there_as_in_torch() -> None:
    given = draw(Case(2, 8, 8, 8))
    clean = train(given, True, native=True)
    given["x"][1, 3, 4, 4] = float("nan")  # a channel of the first network
    ours, theirs = train(given, True, native=True), train(given, True, native=False)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(ours[0][:, 8:], clean[0][:, 8:])
    assert torch.equal(ours[1][:, 8:], clean[1][:, 8:])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(ours[2:5], clean[2:5], strict=True))


def test_a_network_gets_the_same_bits_whoever_stands_beside_it() -> None:
    case = Case(3, 8, 16, 8)
    given = draw(case)
    together = train(given, True, native=True)
    for n in range(3):
        ins, outs = slice(8 * n, 8 * n + 8), slice(16 * n, 16 * n + 16)
        alone = {name: given[name][n : n + 1] for name in ("weight", "scale", "shift")}
        alone |= {"x": given["x"][:, ins], "gradient": given["gradient"][:, outs]}
        alone |= {name: given[name][outs] for name in ("mean", "variance")}
        ours = train(alone, True, native=True)
        parts = [together[0][:, outs], together[1][:, ins], *(t[n : n + 1] for t in together[2:5])]
        parts += [t[outs] for t in together[5:]]
        assert all(torch.equal(a, b) for a, b in zip(ours, parts, strict=True))


def test_two_threads_at_once_get_the_bits_of_one() -> None:
    given = {name: value.float() for name, value in draw(Case(2, 8, 16, 16, batch=8)).items()}

    def work(_: int) -> list[Tensor]:
        leaves = [given[name].clone().requires_grad_() for name in ("x", "weight", "scale", "shift")]
        running = given["mean"].clone(), given["variance"].clone()
        out = NATIVE.train_block(leaves[0], leaves[1], (leaves[2], leaves[3]), running, True)
        return [out.detach(), *torch.autograd.grad(out, leaves, given["gradient"]), *running]

    first = work(0)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(work, range(16)):
            assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))


def test_what_the_kernels_do_not_know_goes_the_torch_way() -> None:
    assert not takes(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    assert not takes(torch.zeros(1, 3, 4, 4, device="meta"))
    odd = NATIVE.infer_block(torch.randn(2, 3, 5, 5), torch.randn(1, 8, 3, 3, 3), torch.zeros(1, 8), True)
    assert odd.shape == (2, 8, 2, 2)


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_only_a_cpu_has_native_kernels(device: str) -> None:
    assert not choose_native("auto", torch.device(device)).native
    with pytest.raises(SettingError, match="float32 on a CPU"):
        choose_native("on", torch.device(device))


@pytest.mark.parametrize(("nets", "channels", "size", "classes"), [(1, 32, 4, 10), (3, 5, 8, 4), (2, 16, 1, 2)])
def test_the_classifier_its_loss_hits_and_gradients_equal_torch(
    nets: int, channels: int, size: int, classes: int
) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(24, nets * channels, size, size, generator=g).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(nets, classes, channels, generator=g), torch.randn(nets, classes, generator=g)
    labels, share = torch.randint(classes, (24, nets), generator=g), torch.tensor([2.0, -1.0, 0.5])[:nets]

    def run(native: bool, dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.to(dtype, copy=True).requires_grad_() for one in (x, weight, bias)]
        with computed_by(native, "head_forward", "head_backward") as layers:
            loss, hits = layers.classifier_loss(*leaves, labels)
            return [loss.detach(), hits, *torch.autograd.grad(loss, leaves, share.to(dtype))]

    ours = run(True, torch.float32)
    assert_close(ours, run(False, torch.float32))
    assert_close(ours, run(False, torch.float64), 1e-6)
    assert 0 < ours[1].sum() < 24 * nets


def test_hits_among_equal_or_broken_logits_are_those_of_torch() -> None:
    x = torch.zeros(3, 2, 2, 2)
    x[1, 0], x[2, 1] = float("nan"), float("inf")
    weight, bias = torch.tensor([[[0.0], [1.0], [1.0]], [[1.0], [0.0], [1.0]]]), torch.zeros(2, 3)  # 0 * inf is a NaN
    found = []
    for native in (True, False):
        with computed_by(native, "head_forward") as layers:
            found.append([layers.classifier_loss(x, weight, bias, torch.full((3, 2), label)) for label in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0].isnan(), theirs[0].isnan())


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_equals_torch_and_a_broken_row_stays_alone(max_norm: float, decay: float) -> None:
    g = torch.Generator().manual_seed(5)
    params, momentum, grad = (torch.randn(4, 37, generator=g) for _ in range(3))
    grad[1] *= 1e-3  # not clipped
    grad[2, 5], grad[3, 6] = float("nan"), float("inf")
    rule, _ = rules_of(TaskConfig(max_grad_norm=max_norm, weight_decay=decay), LearningRates(0.1, 0.2))
    both = []
    for native in (True, False):
        held = params.clone(), momentum.clone()
        with computed_by(native, "sgd_step") as layers:
            layers.sgd_(*held, grad, rule)
        both.append(held)
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert ours[:2].isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("augment", [False, True])
def test_batches_of_images_are_those_of_torch_to_the_bit(augment: bool) -> None:
    g = torch.Generator().manual_seed(5)
    bytes_ = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8, generator=g)
    noise = ImageSet(
        "noise", bytes_, torch.arange(9), bytes_[:4], torch.arange(4), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "", ""
    )
    indices, keys = torch.randint(9, (3, 20), generator=g), torch.tensor([1, 2, 3])
    found = []
    crops = (
        data.training_crops(data.training_bank(noise), indices, keys, 7, augment),
        data.evaluation_crops(data.evaluation_bank(noise), torch.tensor([[3, -1], [0, 2]])),
    )
    for native in (True, False):
        with computed_by(native, "cut_images"):
            cut = images.cut_images if native else data.cut_images
            found.append([part for one in crops for part in data.cut_batch(one, torch.float32, cut)])
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*found, strict=True))


# Seeds with a layer of convolution, norm and ReLU; the others have kernels in whole networks alone (test_fused.py).
LAYERED = (Blueprint.CONV_LIGHT, Blueprint.CONV_SMALL, Blueprint.CONV_HEAVY, Blueprint.DEPTHWISE, Blueprint.BOTTLENECK)


def seed_pass(code: int, case: Case, native: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output with and without a graph, and gradients of input and parameters, of seeds of a blueprint."""
    given = draw(case)
    g = torch.Generator().manual_seed(3)
    table = seed_table(BLUEPRINTS[code], case.inputs)
    rows = (0.5 * torch.randn(case.nets, table.total, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    x = given["x"].to(dtype).requires_grad_()
    with computed_by(native, "seed_forward", "seed_backward") as layers:
        out = seed_forward(layers, BLUEPRINTS[code], table.unpack(rows), x)
        grads = torch.autograd.grad(out, [x, rows], torch.randn(out.shape, generator=g, dtype=torch.float64).to(dtype))
    with computed_by(native, "seed_forward") as layers, torch.no_grad():
        plain = seed_forward(layers, BLUEPRINTS[code], table.unpack(rows), x)
    return [out.detach(), plain, *grads]


@pytest.mark.parametrize("case", [Case(1, 8, 8, 8), Case(2, 12, 12, 4), Case(3, 32, 32, 8), Case(2, 9, 9, 6)])
@pytest.mark.parametrize("code", LAYERED)
def test_seeds_and_their_gradients_equal_torch(code: int, case: Case) -> None:
    ours = seed_pass(code, case, native=True)
    assert_close(ours, seed_pass(code, case, native=False))
    assert_close(ours, seed_pass(code, case, native=False, dtype=torch.float64))


def test_a_seed_of_a_detached_input_leaves_the_host_alone() -> None:
    table = seed_table(BLUEPRINTS[Blueprint.CONV_LIGHT], 8)
    rows = (0.3 * torch.randn(2, table.total)).requires_grad_()
    x = torch.randn(2, 16, 4, 4)
    seed_forward(NATIVE, BLUEPRINTS[Blueprint.CONV_LIGHT], table.unpack(rows), x).sum().backward()
    assert x.grad is None
    assert rows.grad is not None
    assert (rows.grad != 0).any()


def added(native: bool, detached: bool, dtype: torch.dtype) -> list[Tensor]:
    """A blended conv_light seed: output with and without a graph, gradients of host and parameters."""
    case, code = Case(2, 16, 16, 8), Blueprint.CONV_LIGHT
    g = torch.Generator().manual_seed(3)
    table = seed_table(BLUEPRINTS[code], case.inputs)
    rows = (0.5 * torch.randn(case.nets, table.total, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    x = draw(case)["x"].to(dtype).requires_grad_()
    alpha = torch.tensor([0.25, 0.8], dtype=dtype)
    with computed_by(native, "seed_forward", "seed_backward") as layers:
        out = seed_added(layers, BLUEPRINTS[code], table.unpack(rows), x, alpha, detached)
        grads = torch.autograd.grad(out, [x, rows], torch.randn(out.shape, generator=g, dtype=torch.float64).to(dtype))
    with computed_by(native, "seed_forward") as layers, torch.no_grad():
        plain = seed_added(layers, BLUEPRINTS[code], table.unpack(rows), x, alpha, detached)
    return [out.detach(), plain, *grads]


@pytest.mark.parametrize("detached", [False, True])
def test_a_seed_blended_in_by_add_equals_torch(detached: bool) -> None:
    ours = added(True, detached, torch.float32)
    assert_close(ours, added(False, detached, torch.float32))
    assert_close(ours, added(False, detached, torch.float64))


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("case", [Case(2, 16, 16, 8), Case(3, 8, 8, 32), Case(2, 12, 12, 4)])
def test_a_pool_within_the_seed_and_one_behind_it_are_the_same_to_the_bit(case: Case, detached: bool) -> None:
    g = torch.Generator().manual_seed(3)
    table = seed_table(BLUEPRINTS[Blueprint.CONV_LIGHT], case.inputs)
    rows = (0.5 * torch.randn(case.nets, table.total, generator=g)).requires_grad_()
    x = draw(case)["x"].float().round().requires_grad_()  # with an alpha of 0, many equals under the pool
    alpha, found = torch.tensor([0.0, 0.8, 0.3])[: case.nets], []
    size = (case.batch, case.nets * case.inputs, case.size // 2, case.size // 2)
    gradient = torch.randn(size, generator=g)
    for within in (True, False):
        out = seed_added(NATIVE, BLUEPRINTS[Blueprint.CONV_LIGHT], table.unpack(rows), x, alpha, detached, within)
        out = out if within else NATIVE.max_pool(out)
        with torch.no_grad():
            plain = seed_added(NATIVE, BLUEPRINTS[Blueprint.CONV_LIGHT], table.unpack(rows), x, alpha, detached, within)
        plain = plain if within else NATIVE.max_pool(plain)
        found.append([out.detach(), plain, *torch.autograd.grad(out, [x, rows], gradient)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("layer", "single"),
    [(Conv(kernel=5, relu=False), True), (Conv(kernel=1), True), (Conv(norm=False), False)],
)
def test_a_seed_of_one_convolution_and_its_norm_is_blended_in_by_one_kernel(layer: Conv, single: bool) -> None:
    blueprint = Architecture(14, "mine", (layer,))
    table = seed_table(blueprint, 8)
    x, alpha = torch.randn(2, 16, 4, 4, requires_grad=True), torch.tensor([0.3, 0.6])
    out = seed_added(NATIVE, blueprint, table.unpack(torch.randn(2, table.total)), x, alpha, detached=False)
    assert out.grad_fn is not None
    assert (out.grad_fn.name() == "_SeedLayerBackward") == single


def pooled(native: bool, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with computed_by(native and x.shape[1] % LANES == 0, "pool_forward", "pool_backward"):
        layers = NATIVE if native else PLAIN
        out = layers.max_pool(leaf)
        weights = torch.arange(out.numel(), dtype=x.dtype).reshape(out.shape)
        (gradient,) = torch.autograd.grad(out, leaf, weights)
        plain = layers.max_pool(x)
    return [out.detach(), plain, gradient]


@pytest.mark.parametrize("channels", [8, 12, 24])
def test_the_pool_alone_equals_torch_bit_by_bit(channels: int) -> None:
    x = torch.randn(2, channels, 6, 4, generator=torch.Generator().manual_seed(1)).clamp(-0.5, 0.5)  # with ties
    x[0, 1, :2, :2] = float("nan")
    x[1, 0, 0, 1] = float("inf")
    for ours, theirs in zip(pooled(True, x), pooled(False, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
