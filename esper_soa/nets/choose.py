"""Chooses the engine of a run, from its settings, device and hosts: the only file that knows them.
An engine is imported where it may be chosen.

What was chosen is an object that the rules of the run hold. On a CPU the native kernels are taken
wherever they are proven, without a timing; on a GPU engines are tried (trial.py). As a program it
proves the kernels of its process (engines/cpu/library.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, cast

from esper_soa.config.nets import SEQUENCES
from esper_soa.config.registry import name_in
from esper_soa.nets.data.images import CROPS, IMAGES
from esper_soa.nets.engine import Engine, EngineChoice
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.segments import FeatureShape
from esper_soa.nets.needs import GIB, at_once
from esper_soa.nets.setup import Setup
from esper_soa.nets.trial import Example, TrialResult, try_engines
from esper_soa.system.errors import SettingError

NATIVE = "native"  # the kernels in C
REFERENCE = "torch"  # the engine that says what the others must come to
# Torch computes for a GPU where it takes less than this share of the time of kernels that agree
# with it: so clear a difference is the same at every start, and so are the numbers of the run.
SPEED_MARGIN = 0.5


class Kind(NamedTuple):
    """An engine that compute.engine may name."""

    obstacle: Callable[[Setup, int | None], str]  # why it cannot run; "" where it can
    make: Callable[[Setup, EngineChoice], Engine]
    tried_on: str  # kind of device on which `auto` tries it; "" = any


def _part(name: str) -> ModuleType:
    return import_module(f"esper_soa.nets.{name}")


def _blueprints(setup: Setup) -> list[str]:
    return [name_in(one) for one in setup.task.blueprints]


def _kernel_obstacle(setup: Setup, *optimizers: str) -> str:
    """Why kernels that cut images cannot take samples or optimizer; "" where they can."""
    spec = setup.spec
    if CROPS not in spec.cuts:
        return f"the kernels cut {CROPS} of images, not of {spec.name}"
    if spec.num_targets > 1:
        return f"the kernels take one label per sample, not the {spec.num_targets} of {spec.name}"
    optimizer = setup.task.optimizer
    has = optimizer in ("sgd", *optimizers)
    return "" if has else f"the kernels have sgd, not task.optimizer={optimizer}"


def _image_obstacle(setup: Setup) -> str:
    """Why Triton's kernels cannot take samples or optimizer; "" where they can."""
    shape = setup.spec.shape
    reason = f"the kernels take images {list(IMAGES.shape)}, not {list(shape)}"
    return _kernel_obstacle(setup) or reason * (shape != IMAGES.shape)


def _takes_sequences(setup: Setup) -> bool:
    return any(slot.topology == SEQUENCES for slot in setup.shape.slots)


def _native(setup: Setup) -> EngineChoice:
    """The native kernels where they can compute, else torch."""
    sequences = _takes_sequences(setup)
    if sequences:
        reason = _part("engines.cpu.sequences").obstacle(setup.shape)
    else:
        engine = _part("engines.cpu.engine")
        reason = _kernel_obstacle(setup, "adamw") or engine.obstacle(setup.shape)
    wanted = setup.device, TorchEngine(), setup.precision, reason, sequences
    choose = _part("engines.cpu.proof").choose_native
    optimizer = setup.task.optimizer
    return cast(EngineChoice, choose(*wanted, shape=setup.shape, optimizer=optimizer))


def engine_of(part: HostShape | Architecture, slot: FeatureShape = ()) -> str:
    """The engine that computes hosts, or seeds in a slot of such features, on a CPU, in words."""
    programs = _part("engines.cpu.host_program")
    seed = isinstance(part, Architecture)
    why = programs.slot_obstacle(part, slot) if seed else programs.host_obstacle(part)
    return f"torch: no native kernels, {why}" if why else NATIVE


def _native_obstacle(setup: Setup, room: int | None) -> str:
    choice = _native(setup)
    return "" if choice.native else choice.reason


def _triton_obstacle(setup: Setup, room: int | None) -> str:
    support = _part("engines.gpu.support")
    reason: str = _image_obstacle(setup) or support.unavailable_reason(setup.device)
    if reason:
        return reason
    shared = _part("engines.gpu.tile_sizes").shared_limit(setup.device)
    work = setup.precision, setup.batch_size, shared
    reason = support.obstacle(setup.shape, _blueprints(setup), *work)
    return reason or _memory_obstacle(setup, room)


def _memory_obstacle(setup: Setup, room: int | None) -> str:
    """Why what the GPU's kernels keep finds no room; "" where it does, or nobody knows."""
    if room is None:
        return ""
    engine = _triton(setup, EngineChoice(False, "planned"), capture=False)
    kept = at_once(engine.needs(setup))
    left = f"{max(room, 0) / GIB:.1f} GiB are free beside the rest of the run"
    remedy = "lower envs, batch_size or task.base_channels"
    return f"its steps keep {kept / GIB:.1f} GiB, and {left}: {remedy}" if kept > room else ""


def _graphs_obstacle(setup: Setup, room: int | None) -> str:
    kind = setup.device.type
    graphs = "" if kind == "cuda" else f"CUDA graphs need an NVIDIA GPU, not {kind}"
    return _triton_obstacle(setup, room) or graphs


def _native_engine(setup: Setup, choice: EngineChoice) -> Engine:
    if _takes_sequences(setup):
        return cast(Engine, _part("engines.cpu.sequences").SequenceEngine(choice, TorchEngine()))
    return cast(Engine, _part("engines.cpu.engine").CpuEngine(choice))


def _triton(setup: Setup, choice: EngineChoice, capture: bool) -> Engine:
    steps: StepCache = StepCache(capture, device=setup.device)
    return cast(Engine, _part("engines.gpu.support").load_engine(steps, choice))


ENGINES = {  # by the names in config.ENGINES
    NATIVE: Kind(_native_obstacle, _native_engine, "cpu"),
    REFERENCE: Kind(lambda *_: "", lambda _, chosen: TorchEngine(chosen=chosen), ""),
    "triton": Kind(_triton_obstacle, partial(_triton, capture=False), "cuda"),
    "triton_graphs": Kind(_graphs_obstacle, partial(_triton, capture=True), "cuda"),
}


def choose_engine(setup: Setup, example: Example, room: int | None = None) -> Engine:
    """The engine that compute.engine stands for; SettingError if the one it names cannot run.

    example: makes the samples on which engines are tried. room: bytes that the device has left for
    what an engine keeps; None where that is not known.
    """
    setting = setup.compute.engine
    reason = "" if setting == "auto" else ENGINES[setting].obstacle(setup, room)
    if reason:
        message = f"{reason[0].upper()}{reason[1:]}."
        raise SettingError("compute.engine", setting, "auto or torch here", remedy=message)
    if setting == NATIVE or (setting == "auto" and setup.device.type != "cuda"):
        choice = _native(setup)
    elif setting == "auto":
        choice = fastest_engine(setup, example, room)
    else:
        words = "plain torch" if setting == REFERENCE else setting
        choice = EngineChoice(False, f"{words} (compute.engine={setting})", name=setting)
    return ENGINES[choice.name].make(setup, choice)


def fastest_engine(setup: Setup, example: Example, room: int | None = None) -> EngineChoice:
    """The engine for a GPU, of those that agree with torch when they are tried there; torch
    without a trial where the samples are for no other.
    """
    why = _image_obstacle(setup)
    if why:
        return EngineChoice(False, f"plain torch: {why}", name=REFERENCE)
    results = probe_engines(setup, example, room)
    words = tuple(result.words() for result in results)
    best = select_engine(results)
    if best is None:
        reason = "plain torch, although it failed when it was tried"
        return EngineChoice(False, reason, fallback=True, tried=words)
    reason = f"{best.name}, as compared with torch and timed on {setup.device}"
    return EngineChoice(False, reason, name=best.name, tried=words)


def select_engine(results: Sequence[TrialResult]) -> TrialResult | None:
    """The last engine that a run can have, or torch where it is quicker by SPEED_MARGIN."""
    fit = [one for one in results if not one.dropped]
    plain = next((one for one in fit if one.name == REFERENCE), None)
    if plain is not None and plain.seconds < SPEED_MARGIN * fit[-1].seconds:
        return plain
    return fit[-1] if fit else None


def probe_engines(setup: Setup, example: Example, room: int | None = None) -> list[TrialResult]:
    """Trial results of every engine that `auto` may choose on this device."""
    kinds = [name for name, kind in ENGINES.items() if kind.tried_on in ("", setup.device.type)]
    obstacles = {name: ENGINES[name].obstacle(setup, room) for name in kinds}
    fit = [name for name in kinds if not obstacles[name]]
    tried = EngineChoice(False, "tried")
    makers = {name: partial(ENGINES[name].make, setup, tried) for name in fit}
    found = try_engines(setup, example, TorchEngine, reference=REFERENCE, makers=makers)
    results = {result.name: result for result in found}
    return [results.get(name) or TrialResult(name, obstacles[name]) for name in kinds]


if __name__ == "__main__":
    _part("engines.cpu.proof").prove_or_exit(TorchEngine())
