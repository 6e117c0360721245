"""What programs of the GPU's kernels take of shared memory is known before they are compiled; the
table of compiled kernels (test_triton_compiles.py) shows that the formula holds.
"""

import pytest
import torch

from esper_soa.config.nets import TaskConfig, host_slots
from esper_soa.nets.engines.gpu.support import obstacle
from esper_soa.nets.engines.gpu.tile_sizes import LEAST_SHARED, RESERVED, block_tile
from esper_soa.nets.model.blueprints import BLUEPRINTS
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
            two_fit = 2 * (most.shared + RESERVED) <= limit + RESERVED
            assert chosen.stages == (3 if two_fit else 1)


def test_numbers_of_a_tile_by_hand() -> None:
    """128 channels: a step has 32 pixels of 32 numbers and 32 weights of each of the 128."""
    chosen = block_tile(64, 128, 9, torch.float32, 163 << 10)
    assert chosen == (32, 32, 32, 3, 3 * 32 * (32 + 128) * 4)


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
