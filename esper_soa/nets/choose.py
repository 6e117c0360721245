"""Chooses what runs the networks of a run, from its settings, device and hosts; the only file that knows engines.

Called once by build.py. What was chosen is an object that the rules of the run hold: two runs of a process may differ.
"""

from typing import Protocol

import torch

from esper_soa.nets.config import TaskConfig
from esper_soa.nets.convolutions import choose_convolutions
from esper_soa.nets.data import cut_images
from esper_soa.nets.engine import Engine
from esper_soa.nets.engines.cpu.engine import CpuEngine, obstacle
from esper_soa.nets.engines.cpu.support import choose_native
from esper_soa.nets.engines.gpu import support as gpu
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import network_cache
from esper_soa.nets.host import HostShape
from esper_soa.nets.layers import Layers
from esper_soa.nets.precision import choose_precision
from esper_soa.registry import name_in


class ComputeSettings(Protocol):
    """What the settings compute.* say about it."""

    native: str
    triton: str
    convolutions: str
    cuda_graphs: str
    precision: str


def choose_engine(compute: ComputeSettings, device: torch.device, task: TaskConfig, shape: HostShape) -> Engine:
    """The engine for hosts of `task` and their seeds on `device`.

    Whole networks in Triton where it is asked for, in C where that can run; else torch.
    Raises SettingError where the settings ask for what cannot run.
    """
    names = [name_in(one) for one in task.blueprints]
    dtype, why_not = choose_precision(compute.precision, device).dtype, obstacle(task.name, shape, names)
    steps = network_cache(compute.cuda_graphs, device)
    whole = gpu.gpu_engine(compute.triton, device, gpu.obstacle(shape, names, dtype), steps)
    if whole is not None:
        return whole
    chosen = choose_native(compute.native, device, dtype, why_not)
    layers = Layers(choose_convolutions(compute.convolutions, device))
    return CpuEngine(chosen) if chosen.native else TorchEngine(layers, cut_images, chosen, steps)
