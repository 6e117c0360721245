"""The tasks of benchmarks/gpu.py, each run in a process of its own, so that one that fails takes no
other with it.

    python -m benchmarks.gpu_tasks NAME [--device cuda] [--tiny]

Prints one JSON line with what was found. On a CPU, with tiny sizes, the same code is rehearsed:
steps on static buffers instead of CUDA graphs, Triton's interpreter (TRITON_INTERPRET=1) instead of
its compiler.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from benchmarks import eps, machine
from benchmarks.eps_config import EpsConfig
from benchmarks.sides import EngineSide
from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import CapturedPolicy, RecurrentPolicy
from esper_soa.config import ComputeConfig
from esper_soa.errors import UserError
from esper_soa.nets import batched
from esper_soa.nets.engine import Engine
from esper_soa.nets.engines.gpu.support import unavailable_reason
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.layers import PLAIN
from esper_soa.nets.model.blueprints import blueprint_codes
from esper_soa.ops.device import resolve_device

RUNGS = (
    "default",
    "eager",
    "compiled",
    "graphs",
    "triton",
    "graphs+triton",
    "graphs+triton+bfloat16",
)
# a machine of GPUs may have pytest without what spreads tests over its cores
WITHOUT_CORES = "-q --import-mode=importlib"
BEST_PRECISION = "graphs+triton+bfloat16"  # the rung whose precision the plain loop has too
# the wait of an env-step, of engines that launch nothing for seeds that do not run
READ = "read_active_seeds"
WITHOUT_READ = ("triton", "triton_graphs")
# What a GPU is not waited for: its SGD reads no learning rate, and the numbers of the progress bar
# come late.
NOT_ON_GPU = ("sgd_", "read_progress")
BANK = 16_384  # training images, 157 MB: more than the cache of any GPU
SHORT = 1e-2  # distance in 16 bits, beyond twice that of a CPU in bfloat16
TOLERANCE = 1e-3  # relative distance of weights after a few steps on two devices
BLOCKS = (
    (3, 8, 32),
    (8, 16, 16),
    (16, 32, 8),
)  # inputs, outputs and side of the blocks of cifar_baseline
Found = dict[str, object]


class Place(NamedTuple):
    """Where a task runs, and whether it is a rehearsal."""

    device: torch.device
    tiny: bool


def compute_of(rung: str, place: Place) -> ComputeConfig:
    """The settings of a rung of the ladder; on a CPU in torch, which a GPU is compared with and
    rehearsed by.

    default: what a run gets that asks for nothing.
    """
    if rung == "default":
        return ComputeConfig()
    parts = rung.split("+")
    on_gpu = place.device.type == "cuda"
    kernels = "triton" if "triton" in parts else "torch"
    replayed = on_gpu and "graphs" in parts
    precision = "bfloat16" if "bfloat16" in parts else "float32"
    return ComputeConfig(
        compile="on" if rung == "compiled" else "off",
        cuda_graphs="on" if replayed else "off",
        workers=1,
        precision=precision,
        engine="triton_graphs" if replayed and kernels == "triton" else kernels,
    )


def work(place: Place, rung: str, envs: int, batch_size: int) -> EpsConfig:
    """E10: what ten hosts get of CIFAR-10 in the reference, three live seeds, all eight subsets."""
    cfg = EpsConfig(
        name="gpu",
        sides=["engine"],
        envs=envs,
        batch_size=batch_size,
        train_samples=4608,
        val_samples=1000,
        live=3,
        device=str(place.device),
        repeats=3,
        timed_steps=1,
        warmup=4,
        limits=False,
        compute=compute_of(rung, place),
        bank=BANK,
    )
    if place.tiny:
        cfg.envs = min(envs, 2)
        cfg.batch_size = 2
        cfg.train_samples = 4
        cfg.val_samples = 4
        cfg.bank = 64
        cfg.repeats = 2
        cfg.warmup = 3
        cfg.steps = 10
        cfg.update = False
        cfg.task.base_channels = 2
    if (
        place.tiny and "triton" in rung
    ):  # Triton's interpreter takes a quarter of a minute for a host's env-step
        cfg.envs = 1
        cfg.train_samples = 2
        cfg.val_samples = 2
        cfg.repeats = 1
        cfg.warmup = 2
    return cfg


class MixtureSide(EngineSide):
    """The engine with seeds of all kinds, each in another env and slot."""

    def begin(self) -> None:
        """Fresh hosts, whose seeds are born in the next env-step."""
        super().begin()
        state = self.episode.env.state
        codes = blueprint_codes(list(self.cfg.task.blueprints))
        envs, slots = (torch.arange(size, device=self.device) for size in state.slots.stage.shape)
        kinds = torch.tensor(codes, device=self.device)[(envs[:, None] + slots) % len(codes)]
        mixed = torch.where(state.slots.live, kinds, state.slots.blueprint)
        self.episode.env.state = state.replace(slots=state.slots.replace(blueprint=mixed))


def side_at(
    place: Place, rung: str, cfg: EpsConfig, kind: type[EngineSide] = EngineSide
) -> EngineSide:
    """The engine of a work; in a rehearsal its steps lie on static buffers where a GPU would replay
    graphs.
    """
    side = kind(cfg)
    if place.device.type == "cpu" and "graphs" in rung:
        capture_decisions(side)
    return side


@runtime_checkable
class KeepsSteps(Protocol):
    """An engine that may replay its steps."""

    @property
    def steps(self) -> StepCache | None: ...


def counts_of(engine: Engine) -> dict[str, int]:
    """What became of the steps that were kept."""
    return (
        dict(engine.steps.counts)
        if isinstance(engine, KeepsSteps) and engine.steps is not None
        else {}
    )


def capture_decisions(side: EngineSide) -> None:
    """State machine, policy and update on static buffers, without graphs."""
    side.world.kernels = side.world.kernels._replace(steps=StepCache(capture=False))
    if isinstance(side.waiting.agent, RecurrentPolicy) and side.learner is not None:
        side.waiting.agent = CapturedPolicy(side.waiting.agent, StepCache(capture=False))
        side.learner.steps = StepCache(capture=False)


def parity(place: Place, rung: str) -> Found:
    """Weights and accuracies after a few env-steps on this device and on the CPU in plain torch."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # read by the Triton kernels too
    cpu = Place(torch.device("cpu"), place.tiny)
    sides = []
    tolerance = TOLERANCE
    for where, name in ((cpu, "eager"), (place, rung)):
        sides.append(played(where, name))
    if sides[1].world.rules.nets.precision != torch.float32:
        tolerance = SHORT + 2 * weights_apart(played(cpu, "eager+bfloat16"), sides[0])
    accuracy = [side.episode.env.state.signals.val_accuracy.cpu() for side in sides]
    distance = weights_apart(sides[1], sides[0])
    engine = sides[1].world.rules.engine
    return {
        "ok": distance < tolerance,
        "distance": distance,
        "tolerance": tolerance,
        "accuracy_apart": float((accuracy[0] - accuracy[1]).abs().max()),
        "steps": counts_of(engine),
        "engine": engine.chosen.facts(),
        "graphs": sides[1].world.kernels.replay.facts(),
    }


def played(place: Place, rung: str) -> EngineSide:
    """Four hosts after a few env-steps, or a single one, as far as an interpreter of kernels gets
    in a minute.
    """
    cfg = work(place, rung, 1 if place.tiny else 4, 32)
    cfg.train_samples, cfg.val_samples, cfg.update = (
        (2, 2, False) if place.tiny else (64, 64, False)
    )
    cfg.warmup = 2 if place.tiny else cfg.warmup
    side = side_at(place, rung, cfg)
    side.warm_up()
    return side


def weights_apart(one: EngineSide, other: EngineSide) -> float:
    """The largest relative distance of any kind of weights."""
    apart = []
    wanted = other.world.weights.flatten_keys(".")
    for name, value in one.world.weights.flatten_keys(".").items():
        if value.is_floating_point() and name in wanted:
            norm = wanted[name].cpu().norm().clamp(min=1.0)
            apart.append(float((value.cpu() - wanted[name].cpu()).norm() / norm))
    return max(apart)


def syncs(place: Place, rung: str) -> Found:
    """Waits of the host for the device, counted in an env-step in which all seeds are born and in
    the one after it.
    """
    side = side_at(place, rung, work(place, rung, 4, 32))
    side.warm_up()
    side.begin()
    births, steady = waits(side, place.device)
    allowed = 0 if side.world.rules.engine.chosen.name in WITHOUT_READ else 1
    return {
        "ok": max(births, steady) <= allowed,
        "births": births,
        "steady": steady,
        "allowed": allowed,
    }


def waits(side: EngineSide, device: torch.device) -> tuple[int, int]:
    """Waits of the next two env-steps; a rehearsal on a CPU raises where a GPU would be waited for
    outside of READ.
    """
    if device.type != "cpu":
        return machine.count_syncs(side.one_step, device), machine.count_syncs(
            side.one_step, device
        )
    with SyncGuard([READ, *NOT_ON_GPU]) as guard:
        side.one_step()
        first = len(guard.log)
        side.one_step()
    read = [sync.function.split(".")[-1] == READ for sync in guard.log]
    return sum(read[:first]), sum(read[first:])


def mixture(place: Place, name: str, envs: str, batch_size: str) -> Found:
    """The same as `rung`, with seeds of all kinds."""
    return rung(place, name, envs, batch_size, MixtureSide)


def rung(
    place: Place, name: str, envs: str, batch_size: str, kind: type[EngineSide] = EngineSide
) -> Found:
    """EPS and images per second of the engine at E10."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    cfg = work(place, name, int(envs), int(batch_size))
    side = side_at(place, name, cfg, kind)
    with machine.PeakMemory(place.device) as memory:
        side.warm_up()
        timings = [side.run() for _ in range(cfg.repeats)]
    engine = side.world.rules.engine
    graphs = side.world.kernels.replay.facts()
    chosen = {"steps": counts_of(engine), "engine": engine.chosen.facts(), "graphs": graphs}
    return {"ok": True, **figures(cfg, timings), "peak_mib": memory.mib, **chosen}


def baseline(place: Place, envs: str, batch_size: str) -> Found:
    """The plain loop at the same work, in the precision of the best rung; its time per env does not
    depend on their number.
    """
    cfg = work(place, BEST_PRECISION, int(envs), int(batch_size))
    cfg.sides = ["baseline"]
    cfg.repeats = 2
    with ExitStack() as stack:
        one = eps.Contestant("baseline", cfg, stack)
        eps.take_turns([one], cfg.repeats)
    return {"ok": True, **figures(cfg, one.timings), "dtype": one.notes["dtype"]}


def figures(cfg: EpsConfig, timings: list) -> Found:
    """Medians over the timings."""
    total = sorted(timing.total for timing in timings)[len(timings) // 2]
    training = sorted(timing.columns["training"] for timing in timings)[len(timings) // 2]
    train, val = cfg.images
    return {
        "N": cfg.envs,
        "B": cfg.batch_size,
        "T": cfg.train_samples,
        "V": cfg.val_samples,
        "K": cfg.rows,
        "seconds": total,
        "training_seconds": training,
        "eps": cfg.envs / total,
        "images_per_second": (train + val) / total,
        "train_images_per_second": train / training,
        "repeats": len(timings),
    }


def blocks(place: Place) -> Found:
    """Milliseconds of a block, forward and backward: torch and Triton, float32 and bfloat16."""
    reason = unavailable_reason(place.device)
    if reason is not None:
        return {"ok": True, "skipped": reason}
    kernels = importlib.import_module("esper_soa.nets.engines.gpu.blocks")
    found: Found = {"ok": True}
    nets, batches = (2, (2,)) if place.tiny else (64, (32, 512))
    for inputs, outputs, side in BLOCKS:
        for batch in batches:
            for dtype in (torch.float32, torch.bfloat16):
                size = nets, batch, inputs, outputs, 4 if place.tiny else side
                milliseconds = [
                    milliseconds_of(once, place)
                    for once in (
                        plain_block(size, dtype, place),
                        kernel_block(kernels, size, dtype, place),
                    )
                ]
                key = (
                    f"{inputs}->{outputs}, {side}x{side}, B={batch}, "
                    f"{str(dtype).removeprefix('torch.')}"
                )
                found[key] = dict(zip(("torch_ms", "triton_ms"), milliseconds, strict=True))
    return found


def plain_block(size: tuple[int, ...], dtype: torch.dtype, place: Place) -> Callable[[], object]:
    """Forward and backward pass in torch; size: networks, batch, inputs, outputs, side."""
    nets, batch, inputs, outputs, side = size
    x = torch.randn(batch, nets * inputs, side, side, device=place.device).to(dtype)
    leaves = [x.contiguous(memory_format=torch.channels_last).requires_grad_()]
    leaves.append(torch.randn(nets, outputs, inputs, 3, 3, device=place.device).requires_grad_())
    leaves += [
        torch.full((nets, outputs), value, device=place.device).requires_grad_()
        for value in (1.0, 0.0)
    ]
    moving = [torch.full((nets * outputs,), value, device=place.device) for value in (0.0, 1.0)]

    def once() -> object:
        inner = PLAIN.conv2d(leaves[0], leaves[1].to(dtype))
        out = F.relu(F.max_pool2d(batched.batch_norm(inner, *leaves[2:], *moving), 2))
        return torch.autograd.grad(out.sum(), leaves)

    return once


def kernel_block(
    kernels: ModuleType, size: tuple[int, ...], dtype: torch.dtype, place: Place
) -> Callable[[], object]:
    """The same by the kernels; kernels: the module blocks.py."""
    nets, batch, inputs, outputs, side = size
    plan = kernels.BlockPlan(0, inputs, inputs, outputs, 3, side, 2, False, -1, -1, 0, 0)
    x = torch.randn(nets, batch, side**2, inputs, device=place.device).to(dtype)
    params = torch.randn(nets, plan.norm_at + 2 * outputs, device=place.device)
    weights = kernels.weights_of(plan, params, torch.ones(nets, 2 * outputs, device=place.device))
    memory = kernels.memory_of(plan, nets, batch, x)
    room = torch.empty_like(x)
    behind = torch.ones_like(memory.features)
    splits = max(1, min(kernels.MOST_SPLITS, batch * side**2 // kernels.PIXELS_PER_SPLIT))
    partials = torch.zeros(nets, splits, params.shape[1], device=place.device)

    def once() -> object:
        kernels.forward_(plan, x, weights, memory)
        return kernels.backward_(plan, x, weights, memory, (behind, room), partials)

    return once


def milliseconds_of(once: Callable[[], object], place: Place) -> float:
    """Median of some calls."""
    seconds = []
    for _ in range(2 if place.tiny else 12):
        machine.wait_for(place.device)
        begun = time.perf_counter()
        once()
        machine.wait_for(place.device)
        seconds.append(time.perf_counter() - begun)
    return 1e3 * sorted(seconds[len(seconds) // 4 :])[len(seconds) // 3]


def tests(place: Place) -> Found:
    """The kernels' and graphs' own tests on this device."""
    if importlib.util.find_spec("pytest") is None:
        return {"ok": True, "skipped": "pytest is not installed"}
    files = ["tests/nets/test_graphs.py"]
    files += ["tests/nets/test_triton_kernels.py"] * (not place.tiny)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", f"addopts={WITHOUT_CORES}", *files],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return {
        "ok": done.returncode == 0,
        "summary": done.stdout.strip().splitlines()[-1:],
        "output": done.stdout[-2000:],
    }


TASKS: dict[str, Callable[..., Found]] = {
    "parity": parity,
    "syncs": syncs,
    "rung": rung,
    "mixture": mixture,
    "baseline": baseline,
    "blocks": blocks,
    "tests": tests,
}


def main() -> None:
    """Run the task NAME[:argument...]; exit status 1 where it fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    task, *arguments = options.name.split(":")
    try:
        found = TASKS[task](Place(resolve_device(options.device), options.tiny), *arguments)
    except UserError as error:
        found = {"ok": False, "error": str(error)}
    print(json.dumps(found))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
