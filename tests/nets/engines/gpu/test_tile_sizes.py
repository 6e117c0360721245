"""What programs of the GPU's kernels take of shared memory is known before they are compiled; the
table of compiled kernels (test_triton_compiles.py) shows that the formula holds.
"""

import importlib.util

import pytest
import torch

from esper_soa.config.nets import TaskConfig, host_slots
from esper_soa.nets.engines.gpu.support import obstacle, unavailable_reason
from esper_soa.nets.engines.gpu.tile_sizes import (
    LEAST_SHARED,
    RESERVED_BYTES,
    block_tile,
    slot_tile,
)
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.model.conv import ConvSegment
from esper_soa.nets.model.host import host_shape

LIMITS = [limit << 10 for limit in (48, 99, 163, 227)]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_fits_every_gpu_with_as_many_stages_as_there_is_room(
    dtype: torch.dtype, limit: int
) -> None:
    for inputs in (3, 8, 16, 32, 64, 128):
        for outputs in (1, 8, 64, 128):
            chosen = block_tile(inputs, outputs, 9, dtype, limit)
            most = block_tile(inputs, outputs, 9, dtype, 1 << 20)
            assert chosen.shared <= limit
            two_fit = 2 * (most.shared + RESERVED_BYTES) <= limit + RESERVED_BYTES
            assert chosen.stages == (3 if two_fit else 1)


@pytest.mark.parametrize(
    ("sizes", "dtype", "limit", "wanted"),
    [
        # a step has 32 pixels of 32 numbers and 32 weights of each of the 128 channels
        ((64, 128, 9), torch.float32, 163, (32, 32, 32, 3, 3 * 32 * (32 + 128) * 4)),
        ((3, 8, 9), torch.float32, 99, (128, 16, 32, 3, 3 * 16 * (128 + 16) * 4)),
        # the gradients of 64 weights of each channel
        ((128, 128, 9), torch.bfloat16, 48, (32, 32, 64, 1, 64 * 128 * 4)),
        # two tiles of 128 pixels
        ((16, 16, 1), torch.float32, 48, (128, 16, 16, 1, 128 * (16 + 16) * 4)),
    ],
)
def test_numbers_of_a_blocks_tile_by_hand(
    sizes: tuple[int, int, int], dtype: torch.dtype, limit: int, wanted: tuple[int, ...]
) -> None:
    assert block_tile(*sizes, dtype, limit << 10) == wanted


@pytest.mark.parametrize(
    ("lanes", "dtype", "wanted"),
    [
        (8, torch.float32, (128, 16, 64, 128 * (8 + 64) * 4)),
        (32, torch.float32, (32, 32, 64, 32 * (32 + 64) * 4)),
        (64, torch.float32, (16, 32, 32, 32 * (16 + 64) * 4)),
        (128, torch.bfloat16, (16, 32, 32, 128 * 32 * 4)),
    ],
)
def test_numbers_of_a_slots_tile_by_hand(
    lanes: int, dtype: torch.dtype, wanted: tuple[int, ...]
) -> None:
    assert slot_tile(lanes, dtype) == wanted


def test_what_the_kernels_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = host_shape(TaskConfig(), host_slots(TaskConfig()))

    class StridedSegment(ConvSegment):
        kind = "strided"

    for changed, blueprints, told in (
        (
            shape._replace(
                segments=(StridedSegment(**vars(shape.segments[0])), *shape.segments[1:])
            ),
            ["norm"],
            "there is none for segments of the hosts: 0 (strided)",
        ),
        (shape, ["norm", "lora", "mlp"], "there is none for the blueprint lora, mlp"),
        (shape, ["norm"], ""),
    ):
        assert obstacle(changed, blueprints, torch.float32, 8, LEAST_SHARED) == told
    gpu = torch.device("cuda")
    for capability, told in (
        ((8, 0), None),
        ((7, 5), "the GPU has compute capability 7.5, the kernels need 8.0"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: "there")
        assert unavailable_reason(gpu) == told
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert unavailable_reason(gpu) == "the package triton is not installed"


def test_hosts_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    task = TaskConfig(name="wide", base_channels=32)
    shape = host_shape(task, host_slots(task), BLUEPRINTS)
    given = shape, ["conv_light"], torch.float32, 32
    assert obstacle(*given, LEAST_SHARED) == ""
    told = obstacle(*given, 16 << 10)
    least = told.split()[3]  # bytes, of the sizes of tiles
    assert LEAST_SHARED >= int(least) > 16 << 10
    assert told == (
        f"a program needs {least} bytes of shared memory, the device has 16384: lower "
        "task.base_channels, or set compute.precision=bfloat16"
    )
