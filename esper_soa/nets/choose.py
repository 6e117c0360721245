"""Chooses the engine of a run, from its settings, device and hosts: the only file that knows them.
An engine is imported where it may be chosen.

What was chosen is an object that the rules of the run hold. On a CPU the native kernels are taken
wherever they are proven, without a timing; on a GPU engines are tried (trial.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, cast

from esper_soa.config.nets import SEQUENCES
from esper_soa.config.registry import name_in
from esper_soa.nets.data.images import CROPS
from esper_soa.nets.engine import Engine, EngineChoice
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.trial import Trial, TrialResult, try_engines
from esper_soa.system.errors import SettingError

NATIVE = "native"  # the kernels in C
REFERENCE = "torch"  # the engine that says what the others must come to
# Torch computes for a GPU where it takes less than this share of the time of kernels that agree
# with it: so clear a difference is the same at every start, and so are the numbers of the run.
SPEED_MARGIN = 0.5
GIB = 2**30


class Kind(NamedTuple):
    """An engine that compute.engine may name."""

    obstacle: Callable[[Trial], str]  # why it cannot run; "" where it can
    make: Callable[[Trial, EngineChoice], Engine]
    tried_on: str  # kind of device on which `auto` tries it; "" = any


def _part(name: str) -> ModuleType:
    return import_module(f"esper_soa.nets.{name}")


def _blueprints(trial: Trial) -> list[str]:
    return [name_in(one) for one in trial.nets.task.blueprints]


def _kernel_obstacle(trial: Trial) -> str:
    """Why kernels that cut images cannot take samples or optimizer; "" where they can."""
    spec = trial.spec
    if CROPS not in spec.cuts:
        return f"the kernels cut {CROPS} of images, not of {spec.name}"
    if spec.num_targets > 1:
        return f"the kernels take one label per sample, not the {spec.num_targets} of {spec.name}"
    optimizer = trial.nets.task.optimizer
    return "" if optimizer == "sgd" else f"the kernels have sgd, not task.optimizer={optimizer}"


def _takes_sequences(trial: Trial) -> bool:
    return any(slot.topology == SEQUENCES for slot in trial.nets.shape.slots)


def _native(trial: Trial) -> EngineChoice:
    """The native kernels where they can compute, else torch."""
    nets = trial.nets
    sequences = _takes_sequences(trial)
    if sequences:
        reason = _part("engines.cpu.sequences").obstacle(nets.shape)
    else:
        own = nets.task.host_name, nets.shape, _blueprints(trial)
        reason = _kernel_obstacle(trial) or _part("engines.cpu.engine").obstacle(*own)
    wanted = trial.device, TorchEngine(), nets.precision, reason, sequences
    return cast(EngineChoice, _part("engines.cpu.proof").choose_native(*wanted))


def _native_obstacle(trial: Trial) -> str:
    choice = _native(trial)
    return "" if choice.native else choice.reason


def _triton_obstacle(trial: Trial) -> str:
    nets = trial.nets
    support = _part("engines.gpu.support")
    reason: str = _kernel_obstacle(trial) or support.unavailable_reason(trial.device)
    if reason:
        return reason
    shared = _part("engines.gpu.tile_sizes").shared_limit(trial.device)
    work = nets.precision, trial.sizes.batch_size, shared
    reason = support.obstacle(nets.shape, _blueprints(trial), *work)
    return reason or _memory_obstacle(trial)


def _memory_obstacle(trial: Trial) -> str:
    """Why what the GPU's kernels keep finds no room; "" where it does, or nobody knows."""
    room = trial.room()
    if room is None:
        return ""
    engine = _triton(trial, EngineChoice(False, "planned"), capture=False)
    kept = engine.persistent_bytes(trial.nets, trial.sizes, trial.device)
    left = f"{max(room, 0) / GIB:.1f} GiB are free beside the rest of the run"
    remedy = "lower envs, batch_size or task.base_channels"
    return f"its steps keep {kept / GIB:.1f} GiB, and {left}: {remedy}" if kept > room else ""


def _graphs_obstacle(trial: Trial) -> str:
    kind = trial.device.type
    graphs = "" if kind == "cuda" else f"CUDA graphs need an NVIDIA GPU, not {kind}"
    return _triton_obstacle(trial) or graphs


def _native_engine(trial: Trial, choice: EngineChoice) -> Engine:
    if _takes_sequences(trial):
        return cast(Engine, _part("engines.cpu.sequences").SequenceEngine(choice, TorchEngine()))
    return cast(Engine, _part("engines.cpu.engine").CpuEngine(choice))


def _triton(trial: Trial, choice: EngineChoice, capture: bool) -> Engine:
    steps: StepCache = StepCache(capture, device=trial.device)
    return cast(Engine, _part("engines.gpu.support").load_engine(steps, choice))


ENGINES = {  # by the names in config.ENGINES
    NATIVE: Kind(_native_obstacle, _native_engine, "cpu"),
    REFERENCE: Kind(lambda _: "", lambda _, chosen: TorchEngine(chosen=chosen), ""),
    "triton": Kind(_triton_obstacle, partial(_triton, capture=False), "cuda"),
    "triton_graphs": Kind(_graphs_obstacle, partial(_triton, capture=True), "cuda"),
}


def choose_engine(setting: str, trial: Trial) -> Engine:
    """The engine that compute.engine stands for; SettingError if the one it names cannot run."""
    reason = "" if setting == "auto" else ENGINES[setting].obstacle(trial)
    if reason:
        message = f"{reason[0].upper()}{reason[1:]}."
        raise SettingError("compute.engine", setting, "auto or torch here", remedy=message)
    if setting == NATIVE or (setting == "auto" and trial.device.type != "cuda"):
        choice = _native(trial)
    elif setting == "auto":
        choice = fastest_engine(trial)
    else:
        words = "plain torch" if setting == REFERENCE else setting
        choice = EngineChoice(False, f"{words} (compute.engine={setting})", name=setting)
    return ENGINES[choice.name].make(trial, choice)


def fastest_engine(trial: Trial) -> EngineChoice:
    """What computes on a GPU, of the engines that agree with torch when they are tried there; torch
    without a trial where the samples are for no other.
    """
    why = _kernel_obstacle(trial)
    if why:
        return EngineChoice(False, f"plain torch: {why}", name=REFERENCE)
    results = probe_engines(trial)
    words = tuple(one.words() for one in results)
    best = select_engine(results)
    if best is None:
        reason = "plain torch, although it failed when it was tried"
        return EngineChoice(False, reason, fallback=True, tried=words)
    reason = f"{best.name}, as compared with torch and timed on {trial.device}"
    return EngineChoice(False, reason, name=best.name, tried=words)


def select_engine(results: Sequence[TrialResult]) -> TrialResult | None:
    """The last engine that a run can have, or torch where it is quicker by SPEED_MARGIN."""
    fit = [one for one in results if not one.dropped]
    plain = next((one for one in fit if one.name == REFERENCE), None)
    if plain is not None and plain.seconds < SPEED_MARGIN * fit[-1].seconds:
        return plain
    return fit[-1] if fit else None


def probe_engines(trial: Trial) -> list[TrialResult]:
    """Trial results of every engine that `auto` may choose on this device."""
    kinds = [name for name, kind in ENGINES.items() if kind.tried_on in ("", trial.device.type)]
    obstacles = {name: ENGINES[name].obstacle(trial) for name in kinds}
    fit = [name for name in kinds if not obstacles[name]]
    tried = EngineChoice(False, "tried")
    makers = {name: partial(ENGINES[name].make, trial, tried) for name in fit}
    results = {one.name: one for one in try_engines(trial, TorchEngine, REFERENCE, makers=makers)}
    return [results.get(name) or TrialResult(name, obstacles[name]) for name in kinds]
