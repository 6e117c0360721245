"""A blueprint is one entry: forward pass, parameters, initial values, counts and FLOP follow.

That those of the package are what they should be is shown beside other implementations: recorded
vectors in tests/parity, and the modules of a plain loop in test_batch_equals_loop.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.nets import batched
from esper_soa.nets.model.blueprints import (
    BLUEPRINTS,
    GATE,
    Architecture,
    gate_table,
    num_codes,
    parameter_counts,
    seed_forward,
    seed_products,
    seed_table,
)
from esper_soa.nets.model.flops import training_flop
from esper_soa.nets.model.host import fold_batch_norm, host_shape, train_loss
from esper_soa.nets.model.parts import (
    CHANNELS,
    NARROW,
    REDUCED,
    ZEROS,
    Conv,
    Depthwise,
    Excite,
    Part,
    SoftNorm,
    Squeeze,
    Start,
    Width,
    norm_groups,
)
from esper_soa.nets.seeds.pools import parameter_table, row_layout
from esper_soa.nets.seeds.seed_plan import Group
from esper_soa.nets.seeds.seeds import ActiveGroup, SeedFiller, TrainingSeeds
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS, NUM_BLUEPRINTS, Blend, Blueprint
from tests.builders.tiny_world import CPU

NETS = 3
BATCH = 2
SIDE = 6
TWICE = Architecture(NUM_BLUEPRINTS, "twice", (Conv(kernel=1), Conv(kernel=1)))
EXTENDED = (*BLUEPRINTS, TWICE)


def drawn(blueprint: Architecture, channels: int) -> tuple[list[Tensor], Tensor]:
    """Parameters of some size of seeds of a blueprint, and features [B, n*C, H, W]."""
    g = torch.Generator().manual_seed(5)
    table = seed_table(blueprint, channels)
    rows = 0.5 * torch.randn(NETS, table.total, generator=g, dtype=torch.float64)
    x = torch.randn(BATCH, NETS * channels, SIDE, SIDE, generator=g, dtype=torch.float64)
    return table.unpack(rows), x.contiguous(memory_format=torch.channels_last)


def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return batched.group_norm(x, norm_groups(scale.shape[1]), scale, shift)


def test_the_blueprints_of_the_package_have_the_codes_and_names_of_the_vocabulary() -> None:
    assert [one.code for one in BLUEPRINTS] == [Blueprint.NOOP, *CNN_BLUEPRINTS] == list(range(8))
    assert [one.name for one in BLUEPRINTS] == list(BLUEPRINT_NAMES[:8])
    assert num_codes(BLUEPRINTS) == NUM_BLUEPRINTS


# --- counts and FLOP, against torch's own counter


@pytest.mark.parametrize("channels", [1, 8, 24, 64])
@pytest.mark.parametrize("blueprint", EXTENDED[1:], ids=lambda one: one.name)
def test_flop_and_parameters_are_as_torch_counts(blueprint: Architecture, channels: int) -> None:
    task = TaskConfig(base_channels=channels, num_blocks=2, num_pools=2)
    shape = host_shape(task, sort_slots(task, ["r1c0"]), EXTENDED)
    table = seed_table(blueprint, channels)
    x = torch.empty(1, channels, 16, 16, device="meta")
    parameters = table.unpack(torch.empty(1, table.total, device="meta"))
    found = training_flop(shape, CPU).seed[0, blueprint.code]
    assert found == 3 * counted(lambda: seed_forward(blueprint, parameters, x))
    gate = gate_table(channels).unpack(torch.empty(1, gate_table(channels).total, device="meta"))
    assert training_flop(shape, CPU).gate[0] == 3 * counted(lambda: GATE.forward(gate, x))
    numbers = sum(parameter.numel() for parameter in parameters)
    assert parameter_counts(EXTENDED, shape.slots[0])[blueprint.code] == numbers
    assert parameter_table(shape, CPU).seed[0, blueprint.code] == numbers


def counted(forward: Callable[[], Tensor]) -> int:
    """FLOP of a forward pass, by torch."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "task",
    [
        TaskConfig(),
        TaskConfig(base_channels=2, kernel_size=1, num_pools=0),
        TaskConfig(base_channels=3, num_blocks=4, num_pools=2, kernel_size=5, num_classes=7),
    ],
    ids=["baseline", "pointwise", "deep"],
)
def test_flop_and_tables_of_a_host_are_those_of_its_forward_pass(task: TaskConfig) -> None:
    shape = host_shape(task, sort_slots(task, ["r0c0"]))
    parameters = shape.parameters.unpack(torch.rand(1, shape.parameters.total))
    ones = torch.ones(1, shape.statistics.total)
    statistics = [row.reshape(-1) for row in shape.statistics.unpack(ones)]
    batch = torch.rand(2, 3, 32, 32), torch.zeros(2, 1, dtype=torch.int64)
    given = (shape, parameters, statistics, batch, TrainingSeeds([], 1))
    found = counted(lambda: train_loss(*given)[0])
    assert training_flop(shape, CPU).host == 3 * found / 2  # of two images
    folded = fold_batch_norm(shape, parameters, statistics)
    assert [len(own) for own in folded] == [2] * (task.num_blocks + 1)


# --- one more, by one entry


def test_every_part_can_stand_anywhere() -> None:
    squeeze = Squeeze(REDUCED, bias_start=Start(3.0))
    parts: tuple[Part, ...] = (
        Conv(Width(times=4), kernel=1, norm=False),
        Depthwise(kernel=5),
        SoftNorm(),
        Excite(squeeze),
        Conv(NARROW, relu=False),
        Conv(CHANNELS, kernel=5, norm=False, relu=False, start=ZEROS),
    )
    for residual in (True, False):
        wide = Architecture(20, "wide", parts, residual)
        assert wide.widths(16) == [16, 64, 64, 64, 64, 8, 16]
        parameters, x = drawn(wide, 16)
        out = seed_forward(wide, parameters, x)
        one = [own[:1] for own in parameters]
        flop = counted(partial(seed_forward, wide, one, x[:1, :16]))
        assert flop == 2 * seed_products(wide, 16, SIDE**2)
        down, depth, strength, *affine, w1, b1, w2, b2, mid, scale, shift, up = parameters
        y = batched.conv2d(F.relu(batched.conv2d(x, down)), depth)
        y = y + batched.per_channel(torch.tanh(strength), 64) * (norm(y, *affine) - y)
        hidden = F.relu(batched.linear(batched.spatial_mean(y, NETS), w1, b1))
        factor = torch.sigmoid(batched.linear(hidden, w2, b2))
        y = y * factor.flatten(1)[..., None, None]
        y = batched.conv2d(norm(batched.conv2d(y, mid), scale, shift), up)
        assert torch.equal(out, x + y if residual else y)


@pytest.mark.parametrize(
    "parts", [(Conv(kernel=5, relu=False),), (Conv(kernel=1), Conv(kernel=1)), (SoftNorm(),)]
)
def test_a_seed_blended_by_add_moves_by_alpha_towards_its_output(parts: tuple[Part, ...]) -> None:
    mine = Architecture(14, "mine", parts, residual=not isinstance(parts[0], SoftNorm))
    parameters, x = drawn(mine, 8)
    alpha = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    share = batched.per_channel(alpha, 8)
    wanted = x + share * (seed_forward(mine, parameters, x) - x)
    rows = torch.cat([one.reshape(NETS, -1) for one in parameters], dim=1)
    group = Group(0, 14, Blend.ADD, False, False, True, None, torch.arange(NETS))
    added = ActiveGroup(group, mine, 8, rows, torch.zeros_like(rows), alpha)
    filler = SeedFiller([added], NETS)
    for pooled, expected in ((False, wanted), (True, F.max_pool2d(wanted, 2))):
        torch.testing.assert_close(filler.fill(0, x, pooled), expected)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            lambda: Architecture(14, "odd", (Conv(NARROW),)),
            (
                "^blueprint odd: its parts turn 1 channels into 8; the last must give as many "
                "as the first takes$"
            ),
        ),
        (
            lambda: Architecture(14, "odd", (Conv(Width(over=2)),)),
            (
                "^blueprint odd: its parts turn 24 channels into 12; the last must give as "
                "many as the first takes$"
            ),
        ),
        (
            lambda: Conv(kernel=2),
            ("^a kernel of 2 pixels: must be odd, so that padding can leave an image its size$"),
        ),
        (
            lambda: Depthwise(kernel=4),
            ("^a kernel of 4 pixels: must be odd, so that padding can leave an image its size$"),
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(made: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made()


def test_a_code_without_a_blueprint_is_refused_by_name() -> None:
    told = "no blueprint has the code 8: 0 noop, 1 conv_light, .*, 13 twice$"
    with pytest.raises(LookupError, match=told):
        host_shape(TaskConfig(), (), EXTENDED).blueprint(8)


def test_the_rows_of_a_slot_are_as_wide_as_the_widest_of_its_blueprints() -> None:
    task = TaskConfig()
    slots = sort_slots(task, ["r0c0"])
    deep = Architecture(14, "deep", (Conv(), Conv(), Conv()))
    plain = host_shape(task, slots)
    extended = host_shape(task, slots, (*BLUEPRINTS, deep))
    assert row_layout(plain, 0).seed == 2 * (9 * 64 + 16)
    assert row_layout(extended, 0).seed == 3 * (9 * 64 + 16)


def test_groups_of_a_norm_have_16_channels_where_these_divide() -> None:
    wanted = {3: 1, 6: 2, 8: 8, 12: 4, 24: 1, 32: 2, 48: 2, 64: 4, 96: 4, 512: 32, 1024: 32}
    assert {channels: norm_groups(channels) for channels in wanted} == wanted


def test_a_width_is_rounded_down_once() -> None:
    assert [Width(times=3, over=2, least=3).of(channels) for channels in (1, 2, 3)] == [3, 3, 4]


@pytest.mark.parametrize("part", [Conv, Depthwise])
@pytest.mark.parametrize("kernel", [4, 0, -1])
def test_a_kernel_that_no_padding_leaves_the_size_of_images_is_refused(part, kernel: int) -> None:
    with pytest.raises(ValueError, match="odd, so that padding can leave an image its size"):
        part(kernel=kernel)
