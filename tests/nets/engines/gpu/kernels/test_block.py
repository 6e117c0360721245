"""The Triton kernels of a host's block against the plain path, on a GPU or interpreted."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched
from tests.builders.gpu_mixtures import APPROXIMATE, DEVICE, TF32, drawn, per_net

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from esper_soa.nets.engines.gpu import blocks
from esper_soa.nets.engines.gpu.blocks import BlockPlan

pytestmark = pytest.mark.usefixtures("kernel_device")
SPLITS = 2
ROUNDING = 1e-4 * APPROXIMATE
# networks, batch, inputs, outputs, side, kernel, pool, whether the input has a channel of zeros
# more
CASES = [
    (2, 2, 3, 8, 6, 3, 2, True),
    (1, 3, 8, 16, 5, 3, 2, False),
    (3, 2, 4, 5, 4, 1, 1, False),
    (2, 6, 3, 4, 12, 3, 1, True),  # tiles for two splits, the last not full
    # as large as they become: tiles without end, the most channels
    pytest.param((1, 2, 64, 128, 32, 3, 2, False), marks=pytest.mark.slow),
    pytest.param((1, 33, 3, 8, 32, 3, 1, True), marks=pytest.mark.slow),
]


def plan_of(case: tuple) -> "BlockPlan":
    _, _, inputs, outputs, side, kernel, pool, more = case
    return BlockPlan(0, inputs, inputs + more, outputs, kernel, side, pool, False, -1, -1, 0, 0)


def given(case: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [n, B, H*W, C], rows of parameters and of statistics, and the gradient behind the block."""
    nets, batch, inputs, outputs, side, kernel, pool, more = case
    x = F.pad(drawn(1, nets, batch, side**2, inputs), (0, int(more)))
    params = drawn(2, nets, 3 + outputs * (inputs * kernel**2 + 2))[:, 3:]
    statistics = 1 + 0.1 * drawn(3, nets, 2 * outputs)
    return x, params, statistics, drawn(5, nets, batch, (side // pool) ** 2, outputs)


def block_results(
    case: tuple, x: Tensor, params: Tensor, statistics: Tensor, upstream: Tensor
) -> list[Tensor]:
    """Features, running statistics, gradients of parameters and of x [n, B, H*W, C]."""
    plan = plan_of(case)
    (num_nets, batch) = x.shape[:2]
    memory = blocks.memory_of(plan, num_nets, batch, x)
    moved = statistics.clone()
    weights = blocks.weights_of(plan, params, moved)
    partials = torch.zeros(num_nets, SPLITS, params.shape[1], device=DEVICE)
    slot_flags = torch.zeros(num_nets, 1, dtype=torch.int32, device=DEVICE)
    blocks.forward_(plan, x, weights, memory, slot_flags)
    room = torch.full_like(x, torch.nan) if plan.inputs == plan.stored else None
    blocks.backward_(plan, x, weights, memory, (upstream.to(x.dtype), room), partials, slot_flags)
    found = [memory.features, moved, partials.sum(1)]
    return found if room is None else [*found, room]


def convolved(case: tuple, x: Tensor, params: Tensor) -> list[Tensor]:
    """The convolution [B, n*C, H, W] by torch; scale and shift of the norm behind it."""
    _, _, inputs, outputs, side, kernel, *_ = case
    weight, *affine = params.split([outputs * inputs * kernel**2, outputs, outputs], dim=1)
    seen = x[..., :inputs].unflatten(2, (side, side)).permute(1, 0, 4, 2, 3).flatten(1, 2)
    seen = seen.contiguous(memory_format=torch.channels_last)
    return [batched.conv2d(seen, weight.unflatten(1, (outputs, inputs, kernel, kernel))), *affine]


def plain_results(
    case: tuple, x: Tensor, params: Tensor, statistics: Tensor, upstream: Tensor
) -> list[Tensor]:
    """The same by torch."""
    nets, _, _, outputs, _, _, pool, more = case
    leaves = [x.clone().requires_grad_(), params.clone().requires_grad_()]
    inner, scale, shift = convolved(case, *leaves)
    moving = [part.reshape(-1).clone() for part in statistics.split(outputs, dim=1)]
    out = batched.batch_norm(inner, scale, shift, *moving)
    out = F.relu(F.max_pool2d(out, 2) if pool == 2 else out)
    behind = upstream.unflatten(2, out.shape[2:]).permute(1, 0, 4, 2, 3).flatten(1, 2)
    gradients = torch.autograd.grad(out, leaves, behind)
    statistics = torch.cat([part.view(nets, outputs) for part in moving], dim=1)
    found = [per_net(out.detach(), nets).flatten(2, 3), statistics, gradients[1]]
    return found if more else [*found, gradients[0]]


@pytest.mark.parametrize("case", CASES)
def test_block_equals_convolution_norm_pool_and_relu(case: tuple) -> None:
    inputs = given(case)
    both = (results(case, *inputs) for results in (block_results, plain_results))
    for value, wanted in zip(*both, strict=True):
        torch.testing.assert_close(value, wanted, atol=ROUNDING, rtol=ROUNDING)


def test_block_in_tensor_float_32_is_near_float32() -> None:
    inputs = given(CASES[1])
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    found = block_results(CASES[1], *inputs)
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    for value, wanted in zip(found, plain_results(CASES[1], *inputs), strict=True):
        assert (value - wanted).norm() / wanted.norm() < TF32


def test_block_in_bfloat16_is_near_float32() -> None:
    x, params, *rest = given(CASES[1])
    rounded = x.bfloat16(), params.bfloat16().float()
    low = block_results(CASES[1], *rounded, *rest)
    exact = plain_results(CASES[1], rounded[0].float(), rounded[1], *rest)
    assert low[0].dtype == torch.bfloat16
    for value, wanted in zip(low, exact, strict=True):
        assert (value.float() - wanted).norm() / wanted.norm().clamp(min=1) < 0.03


def test_what_a_network_gets_does_not_depend_on_the_others_even_where_they_are_broken() -> None:
    inputs = given(CASES[0])
    broken = given(CASES[0])
    broken[1][0, 0] = torch.nan
    together = block_results(CASES[0], *inputs)
    beside = block_results(CASES[0], *broken)
    alone = block_results(CASES[0], *(part[1:] for part in inputs))
    for ours, theirs, own in zip(together, beside, alone, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[1], own[0])
        assert theirs[0].isnan().any()


@pytest.mark.parametrize("case", CASES)
def test_evaluation_takes_running_statistics_and_leaves_missing_rows_out(case: tuple) -> None:
    (x, params, statistics, _), plan, (nets, batch) = given(case), plan_of(case), case[:2]
    weights = blocks.weights_of(plan, params, statistics)
    rows = 2
    twice = x.repeat_interleave(rows, dim=0)
    features = x.new_full((nets * rows, batch, plan.norm_side**2, plan.outputs), torch.nan)
    counts = torch.full((nets,), rows, dtype=torch.int32, device=DEVICE)
    counts[-1] = 1
    blocks.evaluate_(plan, twice, weights, features, (rows, counts))
    inner, scale, shift = convolved(case, x, params)
    mean, variance = statistics.split(plan.outputs, dim=1)
    gain = scale / (variance + 1e-5).sqrt()
    affine = [part.reshape(-1)[:, None, None] for part in (gain, shift - mean * gain)]
    wanted = F.relu(inner * affine[0] + affine[1])
    wanted = per_net(F.max_pool2d(wanted, 2) if case[6] == 2 else wanted, nets).flatten(2, 3)
    found = features.unflatten(0, (nets, rows))
    torch.testing.assert_close(found[:, 0], wanted, atol=ROUNDING, rtol=ROUNDING)
    torch.testing.assert_close(found[:-1, 1], wanted[:-1], atol=ROUNDING, rtol=ROUNDING)
    assert found[-1, 1].isnan().all()
