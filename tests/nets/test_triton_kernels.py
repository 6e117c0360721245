"""The Triton kernels against the plain path: on a GPU where there is one, else in the interpreter on tiny shapes."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.sync_guard import SyncGuard
from esper_soa.errors import SettingError
from esper_soa.nets import batched, blend
from esper_soa.nets.config import TaskConfig
from esper_soa.nets.engines.gpu.layers import chosen_layers
from esper_soa.nets.engines.gpu.support import unavailable_reason
from esper_soa.nets.host import evaluate_forward, fold_batch_norm, host_shape, train_forward
from esper_soa.nets.layers import PLAIN, GroupNorm, Layers
from esper_soa.nets.model.parts import norm_groups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="the package triton is not installed (extra: test)")

if HAS_TRITON:
    from esper_soa.nets.engines.gpu.block_autograd import Norm, conv_norm_relu_pool, evaluate_conv_relu_pool
    from esper_soa.nets.engines.gpu.seed_autograd import ConvSeed, conv_seed, live_list

CASES = [  # networks, batch, inputs, outputs, height, width, kernel, pool, the same images for all networks
    (2, 2, 3, 8, 6, 6, 3, 2, False),
    (1, 2, 8, 16, 5, 7, 3, 2, False),
    (3, 2, 4, 5, 4, 4, 1, 1, False),
    (2, 3, 3, 4, 4, 4, 3, 2, True),
]
SEEDS = [  # who lives, straight-through pass, detached
    ([True, False, True], False, False),
    ([False, True, True], False, True),
    ([True, False, False], True, False),
    ([False, True, False], True, True),
    ([False, False, False], False, False),
    ([True, True, True], False, False),
]


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    """float32 products on a GPU are not rounded to TF32."""
    torch.backends.cudnn.allow_tf32 = False


class NoSeeds:
    """Every slot is empty."""

    def occupied(self, slot: int) -> bool:
        return False

    def fill(self, layers: Layers, slot: int, x: Tensor, pooled: bool) -> Tensor:
        return x


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def activations(seed: int, *shape: int) -> Tensor:
    return drawn(seed, *shape).contiguous(memory_format=torch.channels_last)


def block_inputs(case: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nets, batch, inputs, outputs, height, width, kernel, _, shared = case
    x = activations(1, batch, inputs * (1 if shared else nets), height, width)
    weight = drawn(2, nets, outputs, inputs, kernel, kernel)
    return x, weight, drawn(3, nets, outputs), 0.1 * drawn(4, nets, outputs)


def plain_block(x: Tensor, weight: Tensor, norm: "Norm", pool: int) -> Tensor:
    x = batched.batch_norm(PLAIN.conv2d(x, weight), *norm)
    return F.relu(F.max_pool2d(x, 2) if pool == 2 else x)


def trained(block: Callable[..., Tensor], inputs: tuple[Tensor, ...], pool: int, with_images: bool) -> list[Tensor]:
    """Output, running statistics and gradients of a block."""
    x, weight, scale, shift = inputs
    leaves = [
        x.clone().requires_grad_(with_images),
        *(part.clone().requires_grad_() for part in (weight, scale, shift)),
    ]
    count = scale.numel()
    mean, var = torch.zeros(count, device=DEVICE), torch.ones(count, device=DEVICE)
    out = block(leaves[0], leaves[1], Norm(leaves[2], leaves[3], mean, var), pool)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad((out * drawn(5, *out.shape)).sum(), asked)
    return [out.detach(), mean, var, *gradients]


@pytest.mark.parametrize("case", CASES)
def test_block_equals_convolution_norm_pool_and_relu(case: tuple) -> None:
    inputs, pool, with_images = block_inputs(case), case[7], not case[8]
    expected = trained(plain_block, inputs, pool, with_images)
    for value, wanted in zip(trained(conv_norm_relu_pool, inputs, pool, with_images), expected, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


def test_block_output_lies_in_channels_last_memory() -> None:
    out = trained(conv_norm_relu_pool, block_inputs(CASES[0]), 2, True)[0]
    assert out.shape == (2, 16, 3, 3)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_block_in_bfloat16_is_near_float32() -> None:
    x, weight, *norm = block_inputs(CASES[0])
    rounded = x.bfloat16(), weight.bfloat16().float()
    low = trained(conv_norm_relu_pool, (*rounded, *norm), 2, True)
    exact = trained(plain_block, (rounded[0].float(), rounded[1], *norm), 2, True)
    assert low[0].dtype == torch.bfloat16
    assert low[4].dtype == torch.float32
    for value, wanted in zip(low, exact, strict=True):
        assert (value.float() - wanted).norm() / wanted.norm().clamp(min=1) < 0.03


def test_nan_in_one_network_touches_no_other() -> None:
    x, weight, scale, shift = block_inputs(CASES[0])
    clean = trained(conv_norm_relu_pool, (x, weight, scale, shift), 2, True)
    broken = weight.clone()
    broken[0, 0, 0, 0, 0] = torch.nan
    broke = []
    for value, wanted in zip(trained(conv_norm_relu_pool, (x, broken, scale, shift), 2, True), clean, strict=True):
        rows = value.permute(1, 0, 2, 3) if value.ndim == 4 else value.reshape(2, -1)
        wanted_rows = wanted.permute(1, 0, 2, 3) if wanted.ndim == 4 else wanted.reshape(2, -1)
        half = rows.shape[0] // 2
        assert torch.equal(rows[half:], wanted_rows[half:])
        broke.append(bool(rows[:half].isnan().any()))
    assert broke[:3] == [True, True, True]  # its output and running statistics


def test_what_a_network_gets_does_not_depend_on_the_others() -> None:
    x, weight, scale, shift = block_inputs(CASES[0])
    together = trained(conv_norm_relu_pool, (x, weight, scale, shift), 2, True)
    own = activations(1, *x.shape)[:, 3:].contiguous(memory_format=torch.channels_last)
    leaves = [own.requires_grad_(), *(part[1:].clone().requires_grad_() for part in (weight, scale, shift))]
    mean, var = torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)
    out = conv_norm_relu_pool(leaves[0], leaves[1], Norm(leaves[2], leaves[3], mean, var), 2)
    gradients = torch.autograd.grad((out * drawn(5, *together[0].shape)[:, 8:]).sum(), leaves)
    assert torch.equal(out, together[0][:, 8:])
    assert torch.equal(mean, together[1][8:])
    for value, wanted in zip(gradients[1:], together[4:], strict=True):
        assert torch.equal(value[0], wanted[1])


@pytest.mark.parametrize("case", CASES)
def test_evaluation_equals_the_plain_path_with_folded_statistics(case: tuple) -> None:
    x, weight, _, shift = block_inputs(case)
    plain = F.relu(PLAIN.conv2d(x, weight, shift))
    plain = F.max_pool2d(plain, 2) if case[7] == 2 else plain
    torch.testing.assert_close(evaluate_conv_relu_pool(x, weight, shift, case[7]), plain, atol=1e-4, rtol=1e-4)


def test_evaluation_does_not_hide_nan_in_relu_or_pool() -> None:
    x, weight, _, shift = block_inputs(CASES[0])
    x[0, 0, 0, 0] = torch.nan
    out = evaluate_conv_relu_pool(x, weight, shift, 2)
    assert out[0, :8, 0, 0].isnan().all()
    assert out[0, 8:].isfinite().all()


def test_activations_in_another_layout_are_refused() -> None:
    x, weight, _, shift = block_inputs(CASES[0])
    with pytest.raises(ValueError, match="channels_last"):
        evaluate_conv_relu_pool(x.contiguous(), weight, shift, 2)


def test_live_list_names_the_live_in_order_and_reads_nothing() -> None:
    live = torch.tensor([False, True, True, False, True], device=DEVICE)
    with SyncGuard():
        listed = live_list(live)
    assert listed.tolist() == [1, 2, 4, -1, -1]


def plain_seed(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, how: "ConvSeed") -> Tensor:
    nets = [number for number in how.live.tolist() if number >= 0]
    if not nets:
        return x * 1
    listed = torch.tensor(nets, device=DEVICE)
    host = batched.take_nets(x, listed, weight.shape[0])
    seen = host.detach() if how.detached else host
    inner = PLAIN.conv2d(seen, weight[listed])
    grown = seen + F.relu(batched.group_norm(inner, how.groups, scale[listed], shift[listed]))
    if how.through:
        return blend.straight_through(x, grown, listed, weight.shape[0])
    return batched.put_nets(x, listed, weight.shape[0], blend.add(host, grown, how.alpha[listed]))


def seed_results(seed: Callable[..., Tensor], inputs: tuple[Tensor, ...], how: "ConvSeed") -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in inputs]
    out = seed(*leaves, how)
    gradients = torch.autograd.grad((out * drawn(6, *out.shape)).sum(), leaves, allow_unused=True)
    found = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(gradients, leaves, strict=True)]
    return [out.detach(), *found]


def seed_inputs(channels: int, kernel: int, size: tuple[int, int]) -> tuple[Tensor, ...]:
    weight = drawn(2, 3, channels, channels, kernel, kernel)
    return activations(1, 2, 3 * channels, *size), weight, drawn(3, 3, channels), 0.1 * drawn(4, 3, channels)


@pytest.mark.parametrize(("live", "through", "detached"), SEEDS)
def test_seeds_of_a_list_equal_the_plain_path(live: list[bool], through: bool, detached: bool) -> None:
    listed = live_list(torch.tensor(live, device=DEVICE))
    how = ConvSeed(listed, torch.tensor([0.25, 0.5, 1.0], device=DEVICE), norm_groups(4), through, detached)
    inputs = seed_inputs(4, 3, (3, 2))
    for value, wanted in zip(seed_results(conv_seed, inputs, how), seed_results(plain_seed, inputs, how), strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


def test_seeds_whose_map_spans_tiles_and_whose_groups_span_channels() -> None:
    # 32 channels make 2 groups of 16; 13 x 11 = 143 pixels are more than a tile of 128.
    alpha = torch.tensor([0.25, 0.5, 1.0], device=DEVICE)
    how = ConvSeed(live_list(torch.tensor([False, True, False], device=DEVICE)), alpha, norm_groups(32), False, False)
    inputs = seed_inputs(32, 1, (13, 11))
    for value, wanted in zip(seed_results(conv_seed, inputs, how), seed_results(plain_seed, inputs, how), strict=True):
        torch.testing.assert_close(value, wanted, atol=2e-4, rtol=2e-4)


def test_seed_in_bfloat16_is_near_float32() -> None:
    listed = live_list(torch.tensor([True, False, True], device=DEVICE))
    how = ConvSeed(listed, torch.full((3,), 0.5, device=DEVICE), norm_groups(4), False, False)
    x, weight, *norm = seed_inputs(4, 3, (3, 2))
    rounded = x.bfloat16(), weight.bfloat16().float()
    low = seed_results(conv_seed, (*rounded, *norm), how)
    exact = seed_results(plain_seed, (rounded[0].float(), rounded[1], *norm), how)
    assert low[0].dtype == torch.bfloat16
    for value, wanted in zip(low, exact, strict=True):
        assert (value.float() - wanted).norm() / wanted.norm().clamp(min=1) < 0.03


def test_a_sleeping_or_broken_seed_touches_no_other_network() -> None:
    listed = live_list(torch.tensor([True, True, False], device=DEVICE))
    how = ConvSeed(listed, torch.full((3,), 0.5, device=DEVICE), norm_groups(4), False, False)
    x, weight, scale, shift = seed_inputs(4, 3, (3, 2))
    clean = seed_results(conv_seed, (x, weight, scale, shift), how)
    broken = weight.clone()
    broken[0, 1] = torch.nan  # lives
    broken[2] = torch.nan  # sleeps
    found = seed_results(conv_seed, (x, broken, scale, shift), how)
    assert found[0][:, :4].isnan().any()
    assert torch.equal(found[0][:, 4:], clean[0][:, 4:])
    assert torch.equal(found[1][:, 4:], clean[1][:, 4:])
    assert torch.equal(found[2][1:], clean[2][1:])
    assert not found[2][2].any()


def test_the_reason_why_the_kernels_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "need a CUDA device, not cpu" in str(unavailable_reason(torch.device("cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unavailable_reason(torch.device("cpu")) is None


def test_hosts_train_and_validate_through_the_kernels() -> None:
    task = TaskConfig(name="tiny", base_channels=2, num_blocks=2, num_pools=1)
    shape = host_shape(task, ())
    rows = shape.parameters.initial(torch.arange(2), torch.float32).to(DEVICE)
    images = activations(1, 2, 6, 4, 4)
    found = []
    for setting in ("off", "on"):
        layers = chosen_layers(setting, DEVICE, PLAIN)
        leaf = rows.clone().requires_grad_()
        start = shape.statistics.initial(torch.arange(2), torch.float32).to(DEVICE)
        statistics = [row.flatten() for row in shape.statistics.unpack(start)]
        logits = train_forward(layers, shape, shape.parameters.unpack(leaf), statistics, images, NoSeeds())
        (gradient,) = torch.autograd.grad(logits.square().sum(), leaf)
        moved = [row.unflatten(0, (2, -1)) for row in statistics]
        folded = fold_batch_norm(shape, shape.parameters.unpack(rows), moved)
        found.append(
            [logits.detach(), gradient, *statistics, evaluate_forward(layers, shape, folded, images, NoSeeds())]
        )
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("detached", [False, True])
def test_seeds_blended_by_add_grow_through_the_kernels(detached: bool) -> None:
    x, *parameters = seed_inputs(4, 3, (3, 2))
    alpha = torch.tensor([0.25, 0.5, 1.0], device=DEVICE)
    found = []
    for setting in ("off", "on"):
        layers = chosen_layers(setting, DEVICE, PLAIN)
        leaves = [part.clone().requires_grad_() for part in (x, *parameters)]
        norm = GroupNorm(leaves[2], leaves[3], norm_groups(4))
        out = layers.added_layer(leaves[0], leaves[1], norm, alpha, detached)
        found.append([out, *torch.autograd.grad((out * drawn(6, *out.shape)).sum(), leaves)])
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)


def test_asking_for_the_kernels_where_they_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SettingError, match="compute.triton"):
        chosen_layers("on", torch.device("cpu"), PLAIN)
    assert chosen_layers("auto", torch.device("cpu"), PLAIN) is PLAIN
