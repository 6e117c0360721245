"""Chooses what runs the networks of a run, from its settings, device and hosts; the only file that
knows engines.

What was chosen is an object that the rules of the run hold: two runs of a process may differ. On a
CPU the native kernels are taken wherever they are proven, without a timing. On a GPU engines are
tried (trial.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from esper_soa.errors import SettingError
from esper_soa.nets.config import TaskConfig
from esper_soa.nets.engine import Choice, Engine
from esper_soa.nets.engines.cpu.engine import CpuEngine, obstacle
from esper_soa.nets.engines.cpu.proof import NAME, choose_native
from esper_soa.nets.engines.gpu import support as gpu
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.host import HostShape
from esper_soa.nets.precision import choose_precision
from esper_soa.nets.trial import Trial, Tried, try_engines
from esper_soa.registry import name_in

REFERENCE = "torch"  # the engine that says what the others must come to
# Torch computes for a GPU where it takes less than this share of the time of kernels that agree
# with it: so clear a difference is the same at every start, and so are the numbers of the run.
CLEARLY = 0.5


class ComputeSettings(Protocol):
    """What the settings compute.* say about it."""

    engine: str
    precision: str


class Asked(NamedTuple):
    """What an engine is wanted for."""

    compute: ComputeSettings
    device: torch.device
    task: TaskConfig
    shape: HostShape
    batch_size: int = 1  # B
    ends_early: bool = False  # whether envs are left out once their episode is over

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return choose_precision(self.compute.precision, self.device).dtype

    @property
    def blueprints(self) -> list[str]:
        """Names of those that the task offers."""
        return [name_in(one) for one in self.task.blueprints]


class Kind(NamedTuple):
    """An engine that compute.engine may name."""

    obstacle: Callable[[Asked], str]  # why it cannot run; "" where it can
    make: Callable[[Asked, Choice], Engine]
    tried_on: str  # kind of device on which `auto` tries it; "" = any


def _native(asked: Asked) -> Choice:
    """The native kernels where they can compute, else torch."""
    why_not = obstacle(asked.task.host_name, asked.shape, asked.blueprints)
    return choose_native(asked.device, TorchEngine(), asked.dtype, why_not)


def _native_obstacle(asked: Asked) -> str:
    chosen = _native(asked)
    return "" if chosen.native else chosen.reason


def _triton_obstacle(asked: Asked) -> str:
    if asked.ends_early:
        return "the kernels cannot leave out the envs whose episode has ended early (early_stop)"
    return gpu.unavailable_reason(asked.device) or gpu.obstacle(
        asked.shape, asked.blueprints, asked.dtype, asked.batch_size
    )


def _graphs_obstacle(asked: Asked) -> str:
    kind = asked.device.type
    graphs = "" if kind == "cuda" else f"CUDA graphs need an NVIDIA GPU, not {kind}"
    return _triton_obstacle(asked) or graphs


def _triton(asked: Asked, chosen: Choice, capture: bool) -> Engine:
    return gpu.loaded_engine(StepCache(capture, device=asked.device), chosen)


# By the names in config.ENGINES.
ENGINES = {
    "native": Kind(_native_obstacle, lambda _, chosen: CpuEngine(chosen), "cpu"),
    "torch": Kind(lambda _: "", lambda _, chosen: TorchEngine(chosen=chosen), ""),
    "triton": Kind(_triton_obstacle, partial(_triton, capture=False), "cuda"),
    "triton_graphs": Kind(_graphs_obstacle, partial(_triton, capture=True), "cuda"),
}


def choose_engine(
    compute: ComputeSettings,
    device: torch.device,
    task: TaskConfig,
    shape: HostShape,
    trial: Trial | None = None,
) -> Engine:
    """The engine for hosts of `task` and their seeds on `device`.

    trial: what engines are tried on where `auto` has to; None: torch is taken there. Raises
    SettingError where the settings insist on what cannot run.
    """
    early = trial is not None and trial.nets.ends_early
    asked = Asked(compute, device, task, shape, 1 if trial is None else trial.batch_size, early)
    if compute.engine == "auto":
        chosen = weighed(asked, trial) if device.type == "cuda" else _native(asked)
    else:
        chosen = _insisted(asked)
    return ENGINES[chosen.name].make(asked, chosen)


def _insisted(asked: Asked) -> Choice:
    """The engine that the setting names."""
    name = asked.compute.engine
    reason = ENGINES[name].obstacle(asked)
    if reason:
        told = f"{reason[0].upper()}{reason[1:]}."
        raise SettingError("compute.engine", name, "auto or torch here", told)
    if name == NAME:
        return _native(asked)
    words = "plain torch" if name == REFERENCE else name
    return Choice(False, f"{words} (compute.engine={name})", name=name)


def weighed(asked: Asked, trial: Trial | None) -> Choice:
    """What computes on a GPU, of the engines that agree with torch when they are tried there."""
    if trial is None:
        return Choice(False, f"plain torch, as no other engine was tried on {asked.device}")
    found = tried_engines(asked, trial)
    words = tuple(one.words() for one in found)
    best = preferred(found)
    if best is None:
        reason = "plain torch, although it failed when it was tried"
        return Choice(False, reason, fallback=True, tried=words)
    reason = f"{best.name}, as compared with torch and timed on {asked.device}"
    return Choice(False, reason, name=best.name, tried=words)


def preferred(found: Sequence[Tried]) -> Tried | None:
    """The last engine of the table that a run can have, or torch where it is CLEARLY quicker."""
    fit = [one for one in found if not one.dropped]
    plain = next((one for one in fit if one.name == REFERENCE), None)
    if plain is not None and plain.seconds < CLEARLY * fit[-1].seconds:
        return plain
    return fit[-1] if fit else None


def tried_engines(asked: Asked, trial: Trial) -> list[Tried]:
    """What became of every engine `auto` may take on this device; those that cannot run too."""
    kinds = [name for name, kind in ENGINES.items() if kind.tried_on in ("", asked.device.type)]
    obstacles = {name: ENGINES[name].obstacle(asked) for name in kinds}
    fit = [name for name in kinds if not obstacles[name]]
    makers = {name: partial(ENGINES[name].make, asked, Choice(False, "tried")) for name in fit}
    tried = try_engines(trial, asked.device, TorchEngine, REFERENCE, makers)
    found = {one.name: one for one in tried}
    return [found.get(name) or Tried(name, obstacles[name]) for name in kinds]
