"""Says why Triton kernels cannot run on a device or for a run's hosts; makes their engine.

Asked by nets/choose.py, and by the benchmarks, which print the reason. Imports neither Triton,
which is not always there, nor the kernels.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence

import torch

from esper_soa.nets.engine import Engine, EngineChoice
from esper_soa.nets.engines.gpu import program
from esper_soa.nets.engines.gpu.tile_sizes import block_tile, lanes_of, slot_tile
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.model.conv import CONV_BLOCK, conv_segments
from esper_soa.nets.model.head import MEAN_LINEAR
from esper_soa.nets.model.host import HostShape, foreign_segments

ENGINE_MODULE = "esper_soa.nets.engines.gpu.engine"
SEGMENT_KINDS = (CONV_BLOCK, MEAN_LINEAR)  # of segments
MAX_LANES = 128  # channels, or hidden units, of a block or of a seed's parts
MOST_CLASSES = 1024
# images of a network in a batch: 65,535 tiles of 64 pixels are the most that a grid has
MAX_BATCH_IMAGES = 4095
MIN_CAPABILITY = (8, 0)  # tensor cores for bfloat16


def unavailable_reason(device: torch.device) -> str | None:
    """None where the kernels run on `device`, else one sentence that says what is missing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return (
            "the kernels are for NVIDIA: the barriers that they rely on do not order global memory "
            f"on ROCm ({torch.version.hip})"
        )
    if device.type != "cuda":
        return (
            f"Triton kernels need a CUDA device, not {device.type} (TRITON_INTERPRET=1 "
            "interprets them for tests)"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        actual, least = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"the GPU has compute capability {actual}, the kernels need {least}"
    return None


def obstacle(
    shape: HostShape, blueprints: Sequence[str], dtype: torch.dtype, batch_size: int, shared: int
) -> str:
    """Why the kernels cannot take such hosts with seeds of these blueprints in `dtype`; or "".

    shared: bytes of shared memory that a program can have.
    """
    unsupported = foreign_segments(shape, SEGMENT_KINDS)
    if unsupported:
        return f"there is none for segments of the hosts: {unsupported}"
    known = {blueprint.name for blueprint in filter(program.runs, shape.blueprints)}
    unknown = [name for name in blueprints if name not in known]
    widths = [block.channels for block in conv_segments(shape.segments)]
    widths += [
        program.widest(program.programs(shape.blueprints, spec.channels)) for spec in shape.slots
    ]
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there is none for {dtype}, which needs loss scales"
    if unknown:
        return f"there is none for the blueprint {', '.join(unknown)}"
    for what, actual, most in (
        ("channels", max(widths), MAX_LANES),
        ("classes", shape.num_classes, MOST_CLASSES),
        ("images in a batch", batch_size, MAX_BATCH_IMAGES),
    ):
        if actual > most:
            return f"they hold at most {most} {what}, not {actual}"
    least = shared_bytes(shape, max(widths), dtype, limit=shared)
    if least > shared:
        return (
            f"a program needs {least} bytes of shared memory, the device has {shared}: lower "
            "task.base_channels, or set compute.precision=bfloat16"
        )
    return ""


def shared_bytes(shape: HostShape, lanes: int, dtype: torch.dtype, limit: int) -> int:
    """Bytes of shared memory that suffice for every program; lanes: most channels or hidden units.

    limit: bytes that a program can have.
    """
    blocks = [
        block_tile(block.inputs, block.channels, block.kernel**2, dtype=dtype, limit=limit).shared
        for block in conv_segments(shape.segments)
    ]
    return max(slot_tile(lanes_of(lanes), dtype).shared, *blocks)


def load_engine(steps: StepCache, choice: EngineChoice) -> Engine:
    """The engine of the kernels, where they can run; steps: captured into CUDA graphs or not."""
    engine: Engine = importlib.import_module(ENGINE_MODULE).GpuEngine(steps, choice)
    return engine
