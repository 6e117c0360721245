"""Chooses what runs the networks of a run, from its settings, device and hosts; the only file that
knows engines.

Called once by build.py. What was chosen is an object that the rules of the run hold: two runs of a
process may differ. On a CPU the native kernels are taken wherever they are proven, without a
timing. On a GPU engines are tried (trial.py).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch

from esper_soa.errors import SettingError
from esper_soa.nets.config import TaskConfig
from esper_soa.nets.convolutions import choose_convolutions
from esper_soa.nets.data import cut_images
from esper_soa.nets.engine import Choice, Engine
from esper_soa.nets.engines.cpu.engine import CpuEngine, obstacle
from esper_soa.nets.engines.cpu.support import choose_native
from esper_soa.nets.engines.gpu import support as gpu
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.host import HostShape
from esper_soa.nets.layers import PLAIN, Layers
from esper_soa.nets.precision import choose_precision
from esper_soa.nets.trial import Trial, Tried, quickest, try_engines
from esper_soa.nets.verdicts import keep_verdict, kept_verdict, verdict_key
from esper_soa.registry import is_reference, name_in

REFERENCE = "torch"  # the engine that says what the others must come to


class ComputeSettings(Protocol):
    """What the settings compute.* say about it."""

    engine: str
    convolutions: str
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


class Kind(NamedTuple):
    """An engine that compute.engine may name."""

    obstacle: Callable[[Asked], str]  # why it cannot run; "" where it can
    make: Callable[[Asked, Choice], Engine]
    tried_on: str  # kind of device on which `auto` tries it; "" = any


def _native(asked: Asked) -> Choice:
    """Whether the native kernels compute, as far as the setting leaves it open."""
    why_not = obstacle(
        asked.task.host_name, asked.shape, [name_in(one) for one in asked.task.blueprints]
    )
    return choose_native(asked.compute.engine, asked.device, asked.dtype, why_not)


def _native_obstacle(asked: Asked) -> str:
    why_not = obstacle(
        asked.task.host_name, asked.shape, [name_in(one) for one in asked.task.blueprints]
    )
    chosen = choose_native("auto", asked.device, asked.dtype, why_not)
    return "" if chosen.native else chosen.reason


def _graphs_obstacle(asked: Asked) -> str:
    if asked.ends_early:
        return (
            "steps that are kept cannot leave out the envs whose episode has ended early "
            "(early_stop)"
        )
    return (
        ""
        if asked.device.type == "cuda"
        else f"CUDA graphs need an NVIDIA GPU, not {asked.device.type}"
    )


def _triton_obstacle(asked: Asked) -> str:
    if asked.ends_early:
        return "the kernels cannot leave out the envs whose episode has ended early (early_stop)"
    names = [name_in(one) for one in asked.task.blueprints]
    return gpu.unavailable_reason(asked.device) or gpu.obstacle(
        asked.shape, names, asked.dtype, asked.batch_size
    )


def _plain(asked: Asked) -> Layers:
    return Layers(choose_convolutions(asked.compute.convolutions, asked.device))


def _torch(asked: Asked, chosen: Choice) -> Engine:
    return TorchEngine(_plain(asked), cut_images, chosen)


def _torch_graphs(asked: Asked, chosen: Choice) -> Engine:
    return TorchEngine(
        _plain(asked), cut_images, chosen, StepCache(capture=True, device=asked.device)
    )


def _triton(_: Asked, chosen: Choice) -> Engine:
    return gpu.loaded_engine(StepCache(capture=False), chosen)


def _triton_graphs(asked: Asked, chosen: Choice) -> Engine:
    return gpu.loaded_engine(StepCache(capture=True, device=asked.device), chosen)


# By the names in config.ENGINES.
ENGINES = {
    "native": Kind(_native_obstacle, lambda _, chosen: CpuEngine(chosen), "cpu"),
    "torch": Kind(lambda _: "", _torch, ""),
    "torch_graphs": Kind(_graphs_obstacle, _torch_graphs, "cuda"),
    "triton": Kind(_triton_obstacle, _triton, "cuda"),
    "triton_graphs": Kind(
        lambda asked: _graphs_obstacle(asked) or _triton_obstacle(asked), _triton_graphs, "cuda"
    ),
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
    if name in (REFERENCE, "native"):
        return _native(asked)
    reason = ENGINES[name].obstacle(asked)
    if reason:
        raise SettingError(
            "compute.engine", name, "auto or torch here", f"{reason[0].upper()}{reason[1:]}."
        )
    return Choice(False, f"{name} (compute.engine={name})", name=name)


def weighed(asked: Asked, trial: Trial | None) -> Choice:
    """The quickest engine of those that agree with torch, as found now or at an earlier run of the
    same kind.
    """
    if trial is None:
        return Choice(False, f"plain torch, as no other engine was tried on {asked.device}")
    compute = asked.compute
    key = verdict_key(trial, asked.device, [compute.convolutions])
    own = any(map(is_reference, (asked.task.host, *asked.task.blueprints)))
    # what a user's own part computes is in no key
    found = None if own else kept_verdict(key, Tried)
    when = "found at an earlier run"
    kept = ""
    if found is None:
        found = tried_engines(asked, trial)
        when = "tried now"
        kept = "not kept, for parts of your own" if own else keep_verdict(key, found)
    best = quickest(found)
    words = tuple(one.words() for one in found)
    if best is None:
        return Choice(
            False, "plain torch, although it failed when it was tried", fallback=True, tried=words
        )
    note = f"{when}; {kept}" if kept else when
    reason = f"{best.name}, the quickest of {len(found)} engines that agrees with torch ({note})"
    return Choice(False, reason, name=best.name, tried=words)


def tried_engines(asked: Asked, trial: Trial) -> list[Tried]:
    """What became of every engine that `auto` may take on this kind of device; those that cannot
    run here as well.
    """
    kinds = {
        name: kind for name, kind in ENGINES.items() if kind.tried_on in ("", asked.device.type)
    }
    obstacles = {name: kind.obstacle(asked) for name, kind in kinds.items()}
    unasked = Choice(False, "tried")
    makers = {
        name: partial(kind.make, asked, unasked)
        for name, kind in kinds.items()
        if not obstacles[name]
    }
    exact = partial(TorchEngine, PLAIN, cut_images, unasked)
    found = {one.name: one for one in try_engines(trial, asked.device, exact, REFERENCE, makers)}
    return [found.get(name) or Tried(name, obstacles[name]) for name in kinds]
