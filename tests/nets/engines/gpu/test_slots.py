"""A slot of all networks in one launch against torch by groups, on a GPU or interpreted:
mixtures of everything.
"""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config.nets import TaskConfig
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.seeds.seed_plan import THROUGH, SeedPlan
from esper_soa.vocabulary import CNN_BLUEPRINTS, Blend, Blueprint
from tests.builders import gpu_mixtures
from tests.builders.gpu_mixtures import (
    APPROXIMATE,
    DEVICE,
    ODD,
    SlotResult,
    drawn,
    mixed_plan,
    plain_slot,
    random_weights,
)

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from esper_soa.nets.engines.gpu import blocks, slots

pytestmark = pytest.mark.usefixtures("kernel_device")
ROUNDING = 2e-4 * APPROXIMATE
EVERY_CODE = (*CNN_BLUEPRINTS, *(one.code for one in ODD))


def triton_slot(
    shape: HostShape, weights: TensorDict, plan: SeedPlan, alpha: Tensor, x: Tensor, behind: Tensor
) -> SlotResult:
    """As plain_slot by the kernels; x [N, B, H, W, C], in its format."""
    rows = weights["seeds", "r0c0", "params"]
    num_nets, batch, height, width = x.shape[:4]
    pooled = behind.shape[2] != height
    table = slots.slot_table(shape, 0, DEVICE)
    work = slots.slot_workspace(table, num_nets * batch, (height, width), x, True)
    slot_flags = gpu_mixtures.planned_roster(plan)
    slot = slots.slot_of(table, slot_flags, alpha.float(), rows, work, (height, width), pooled)
    features = x.flatten(2, 3).clone()
    gradient = behind.flatten(2, 3).to(x.dtype).clone()
    small = torch.full_like(gradient, torch.nan) if pooled else features
    codes = torch.zeros_like(small, dtype=torch.uint8)
    slots.forward_(slot, features, small, codes)
    before = torch.full_like(features, torch.nan) if pooled else gradient
    partials = rows.new_zeros(num_nets, slots.num_splits(batch), rows.shape[1])
    slots.backward_(slot, before, gradient, codes)
    slots.weights_((slot,), (partials,), batch)
    out = small.view(behind.shape)
    return SlotResult(out, before.view(x.shape), partials.sum(1))


def assert_same(found: SlotResult, wanted: SlotResult, rounding: float = ROUNDING) -> None:
    for name, ours, theirs in zip(SlotResult._fields, found, wanted, strict=True):
        scale = float(theirs.abs().max().clamp(min=1.0))
        assert float((ours.float() - theirs).abs().max()) < rounding * scale, name


def single(blueprint: int, blend: int, detached: bool, frozen: bool = False) -> SeedPlan:
    """Two networks, the first without a seed."""
    plan = mixed_plan(2, 1, 0)
    wanted = ([[False], [True]], blueprint, blend, detached, frozen, True)
    for facts, value in zip(plan, wanted, strict=True):
        facts[...] = value
    return plan


BLENDS = (THROUGH, Blend.ADD, Blend.MULTIPLY, Blend.GATE)
# Every kind with one blend and detached or not, and each of those in turn; the others are slow.
SINGLES = [
    pytest.param(detached, code, blend, marks=[] if quick else pytest.mark.slow)
    for place, code in enumerate(EVERY_CODE)
    for turn, blend in enumerate(BLENDS)
    for detached in (False, True)
    for quick in [(place % 4, place % 8 // 4) == (turn, detached)]
]


@pytest.mark.parametrize(("detached", "code", "blend"), SINGLES)
def test_a_seed_of_every_kind_and_blend_equals_torch(detached: bool, code: int, blend: int) -> None:
    shape = gpu_mixtures.slot_shape(4, odd=True)
    alpha = torch.tensor([[0.3], [0.6]], dtype=torch.float64, device=DEVICE)
    x = drawn(1, 2, 1, 3, 2, 4)
    plan = single(code, blend, detached)
    given = (shape, random_weights(shape, 2, 5), plan, alpha, x, drawn(2, *x.shape))
    found = triton_slot(*given)
    assert_same(found, plain_slot(*given))
    assert torch.equal(found.features[0], x[0])


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True])
def test_a_slot_as_large_as_it_becomes_equals_torch(pooled: bool) -> None:
    shape = gpu_mixtures.slot_shape(128)
    alpha = torch.tensor([[0.3], [0.6]], dtype=torch.float64, device=DEVICE)
    x = drawn(1, 2, 1, 32, 32, 128)
    upstream = drawn(2, 2, 1, *(16, 16) if pooled else (32, 32), 128)
    plan = single(Blueprint.CONV_LIGHT, Blend.GATE, False)
    weights = random_weights(shape, 2, 5)
    assert_same(
        *(slot(shape, weights, plan, alpha, x, upstream) for slot in (triton_slot, plain_slot))
    )


MIXTURES = [  # networks, batch, size, channels
    (1, 3, (4, 4), 8),
    (3, 1, (5, 3), 2),
    (5, 1, (2, 2), 4),
    (1, 1, (12, 12), 32),
    (17, 1, (2, 2), 4),
    (2, 9, (2, 2), 24),
    (2, 5, (2, 2), 24),
]


@pytest.mark.parametrize(
    ("num_nets", "batch", "size", "channels", "pooled"),
    [
        pytest.param(
            *mixture, pooled, marks=[] if place < 4 and pooled == place % 2 else pytest.mark.slow
        )
        for place, mixture in enumerate(MIXTURES)
        for pooled in (False, True)
    ],
)
def test_a_mixture_of_everything_equals_torch(
    num_nets: int, batch: int, size: tuple[int, int], channels: int, pooled: bool
) -> None:
    shape = gpu_mixtures.slot_shape(channels, odd=True)
    plan = mixed_plan(num_nets, 1, num_nets + batch, EVERY_CODE)
    alpha = torch.rand(num_nets, 1, dtype=torch.float64, device=DEVICE)
    x = drawn(3, num_nets, batch, *size, channels)
    behind = (size[0] // 2, size[1] // 2) if pooled else size
    upstream = drawn(4, num_nets, batch, *behind, channels)
    given = (shape, random_weights(shape, num_nets, 7), plan, alpha, x, upstream)
    assert_same(triton_slot(*given), plain_slot(*given))


def test_in_bfloat16_a_slot_is_near_float32() -> None:
    shape = gpu_mixtures.slot_shape(8)
    alpha = torch.full((4, 1), 0.4, dtype=torch.float64, device=DEVICE)
    given = (shape, random_weights(shape, 4, 7), mixed_plan(4, 1, 2), alpha)
    x = drawn(3, 4, 1, 4, 4, 8).bfloat16()
    upstream = drawn(4, *x.shape).bfloat16()
    found = triton_slot(*given, x, upstream)
    wanted = plain_slot(*given, x.float(), upstream.float())
    assert found.features.dtype == torch.bfloat16
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.03


def test_a_broken_or_sleeping_seed_touches_no_other_network() -> None:
    shape = gpu_mixtures.slot_shape(4)
    plan = mixed_plan(5, 1, 3)
    for facts, value in zip(plan[:2], ([[True], [True], [False], [True], [True]], 1), strict=True):
        facts[...] = value
    plan.blend[...] = Blend.ADD
    plan.frozen[...] = [[False], [False], [False], [True], [False]]
    weights = random_weights(shape, 5, 7)
    alpha = torch.full((5, 1), 0.4, dtype=torch.float64, device=DEVICE)
    x = drawn(3, 5, 1, 2, 3, 4)
    upstream = drawn(4, *x.shape)
    clean = triton_slot(shape, weights, plan, alpha, x, upstream)
    weights["seeds", "r0c0", "params"][1:3] = torch.nan
    found = triton_slot(shape, weights, plan, alpha, x, upstream)
    assert found.features[1].isnan().any()
    for ours, theirs in zip(found, clean, strict=True):
        assert torch.equal(ours[[0, 2, 3, 4]], theirs[[0, 2, 3, 4]])
    assert not found.rows[2:4].any()  # asleep, frozen
    assert found.rows[4].any()


def test_parts_of_sums_and_programs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide how sums are rounded, and what lies in the caches."""
    assert [slots.num_splits(batch) for batch in (1, 8, 9, 1000)] == [1, 1, 2, 16]
    shape = host_shape(TaskConfig(), ())  # of images of 1024 pixels
    assert [blocks.num_splits(batch, shape) for batch in (1, 5, 1000)] == [1, 5, 32]
    assert slots.num_programs(torch.device("cpu")) == 2
    ten = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ten)
    assert slots.num_programs(torch.device("cuda")) == 40
