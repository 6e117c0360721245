"""The tasks of benchmarks/gpu.py, each run in a process of its own, so that one that fails takes no other with it.

    python -m benchmarks.gpu_tasks NAME [--device cuda] [--tiny]

Prints one JSON line with what was found. On a CPU, with tiny sizes, the same code is rehearsed: steps on static buffers
instead of CUDA graphs, Triton's interpreter (TRITON_INTERPRET=1) instead of its compiler.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import eps, machine
from benchmarks.eps_config import EpsConfig
from benchmarks.sides import EngineSide
from benchmarks.sync_guard import SyncGuard
from benchmarks.timing import BenchmarkError
from esper_soa.agent.policy import CapturedPolicy, RecurrentPolicy
from esper_soa.config import ComputeConfig
from esper_soa.env.step import guard_, on_static_buffers
from esper_soa.errors import UserError
from esper_soa.nets import batched
from esper_soa.nets.engine import Engine
from esper_soa.nets.engines.gpu.support import unavailable_reason
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.layers import PLAIN
from esper_soa.nets.pools import claim_, read_active_seeds
from esper_soa.ops.device import resolve_device
from esper_soa.state import Measurements, View

RUNGS = ("eager", "compiled", "networks", "graphs", "graphs+tuned", "triton", "graphs+triton", "graphs+triton+bfloat16")
BEST_PRECISION = "graphs+triton+bfloat16"  # the rung whose precision the plain loop has too
TOLERANCE = 1e-3  # relative distance of weights after a few steps on two devices
BLOCKS = ((3, 8, 32), (8, 16, 16), (16, 32, 8))  # inputs, outputs and side of the blocks of cifar_baseline
Found = dict[str, object]


class Place(NamedTuple):
    """Where a task runs, and whether it is a rehearsal."""

    device: torch.device
    tiny: bool


def compute_of(rung: str, place: Place) -> ComputeConfig:
    """The settings of a rung of the ladder; on a CPU in torch, which a GPU is compared with and rehearsed by."""
    parts = rung.split("+")
    kept = "on" if "graphs" in parts else "networks" if "networks" in parts else "off"
    graphs = kept if place.device.type == "cuda" else "off"
    triton = "on" if "triton" in parts else "off"
    precision = "bfloat16" if "bfloat16" in parts else "float32"
    convolutions = "auto" if "tuned" in parts else "channels_last"
    return ComputeConfig(
        compile="on" if rung == "compiled" else "off", cuda_graphs=graphs, triton=triton, convolutions=convolutions,
        workers=1, precision=precision, native="off",
    )  # fmt: skip


def work(place: Place, rung: str, envs: int, batch_size: int) -> EpsConfig:
    """E10: what ten hosts get of CIFAR-10 in the reference, three live seeds, all eight subsets."""
    cfg = EpsConfig(
        name="gpu", sides=["engine"], envs=envs, batch_size=batch_size, train_samples=4608, val_samples=1000, live=3,
        device=str(place.device), repeats=3, timed_steps=1, warmup=4, limits=False, compute=compute_of(rung, place),
    )  # fmt: skip
    if place.tiny:
        cfg.envs, cfg.batch_size, cfg.train_samples, cfg.val_samples = min(envs, 2), 2, 4, 4
        cfg.repeats, cfg.warmup, cfg.steps, cfg.update, cfg.task.base_channels = 2, 3, 10, False, 2
    return cfg


def side_at(place: Place, rung: str, cfg: EpsConfig) -> EngineSide:
    """The engine of a work; in a rehearsal its steps lie on static buffers where a GPU would replay graphs."""
    side = EngineSide(cfg)
    if place.device.type == "cpu" and ("graphs" in rung or "networks" in rung):
        rules = side.world.rules
        if not isinstance(rules.engine, TorchEngine):
            raise BenchmarkError(f"{rung}: {rules.engine.chosen.reason} keeps no steps")
        side.world.rules = rules._replace(engine=replace(rules.engine, steps=StepCache(capture=False)))
    if place.device.type == "cpu" and "graphs" in rung:
        capture_decisions(side)
    return side


def counts_of(engine: Engine) -> dict[str, int]:
    """What became of the steps that were kept."""
    return dict(engine.steps.counts) if isinstance(engine, TorchEngine) and engine.steps is not None else {}


def capture_decisions(side: EngineSide) -> None:
    """State machine, policy and update on static buffers, without graphs."""
    side.world.kernels = on_static_buffers(side.world.kernels, StepCache(capture=False))
    if isinstance(side.waiting.agent, RecurrentPolicy) and side.learner is not None:
        side.waiting.agent = CapturedPolicy(side.waiting.agent, StepCache(capture=False))
        side.learner.steps = StepCache(capture=False)


def parity(place: Place, rung: str) -> Found:
    """Weights and accuracies after a few env-steps on this device and on the CPU in plain torch."""
    torch.backends.cudnn.allow_tf32 = False
    cpu = Place(torch.device("cpu"), place.tiny)
    sides = []
    for where, name in ((cpu, "eager"), (place, rung)):
        cfg = work(where, name, 4, 32)
        cfg.train_samples, cfg.val_samples, cfg.update = (4, 4, False) if place.tiny else (64, 64, False)
        sides.append(side_at(where, name, cfg))
        sides[-1].warm_up()
    distances = {}
    wanted = sides[0].world.weights.flatten_keys(".")
    for name, value in sides[1].world.weights.flatten_keys(".").items():
        if value.is_floating_point():
            norm = wanted[name].norm().clamp(min=1.0)
            distances[name] = float((value.cpu() - wanted[name]).norm() / norm)
    accuracy = [side.episode.env.state.signals.val_accuracy.cpu() for side in sides]
    return {
        "ok": max(distances.values()) < TOLERANCE, "distance": max(distances.values()), "tolerance": TOLERANCE,
        "accuracy_apart": float((accuracy[0] - accuracy[1]).abs().max()),
        "steps": counts_of(sides[1].world.rules.engine),
    }  # fmt: skip


def syncs(place: Place, rung: str) -> Found:
    """An env-step, from the active seeds on, in which the host may not wait for the device; raises where it does."""
    side = side_at(place, rung, work(place, rung, 4, 32))
    side.warm_up()
    guarded_step(side, place.device)
    return {"ok": True, "syncs": 0, "apart_from": "read_active_seeds, once per env-step"}


def guarded_step(side: EngineSide, device: torch.device) -> None:
    """As env/step.py and ops/collect.py do it, the read of the active seeds left outside of the guard."""
    world, rules, state = side.world, side.world.rules, side.episode.env.state
    todo, alpha, memory = world.work(side.step), state.slots.alpha, side.player.agent.start(side.cfg.envs, device)
    noise, active_seeds = world.noise(side.step), read_active_seeds(state.slots, state.ramp, False)
    with no_syncs(device):
        claim_(world.weights, rules.nets.shape, active_seeds, todo.seed_keys)
        trained = rules.engine.train_(rules.nets, world.weights, alpha, active_seeds, todo.training, todo.num_batches)
        tested = rules.engine.validate(rules.nets, world.weights, alpha, active_seeds, todo.validation)
        measured = Measurements(
            train_loss=trained.loss, train_accuracy=trained.accuracy, val_loss=tested.loss, accuracy=tested.accuracy,
            subset=tested.subset, ablated=tested.ablated, gradients=trained.gradients, batch_size=state.batch_size,
        )  # fmt: skip
        state, measured = guard_(rules, world.weights, state, measured)
        observed = world.kernels.record_and_observe(rules, state, measured)
        view = View(
            state=observed.state, observation=observed.observation, masks=observed.masks, noise=noise,
            batch_size=state.batch_size,
        )  # fmt: skip
        with torch.no_grad():
            decision, _ = side.player.agent.act(view, memory)
        world.kernels.apply_action(rules, observed, decision.action)


@contextmanager
def no_syncs(device: torch.device) -> Iterator[None]:
    """Raises where the host would wait for the device; on a CPU where it would on a GPU."""
    if device.type == "cpu":
        with SyncGuard(["sgd_"]):  # its kernel for a CPU reads the learning rate, which a GPU never does
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def rung(place: Place, name: str, envs: str, batch_size: str) -> Found:
    """EPS and images per second of the engine at E10."""
    torch.set_float32_matmul_precision("high")
    cfg = work(place, name, int(envs), int(batch_size))
    side = side_at(place, name, cfg)
    with machine.PeakMemory(place.device) as memory:
        side.warm_up()
        timings = [side.run() for _ in range(cfg.repeats)]
    steps = counts_of(side.world.rules.engine)
    return {"ok": True, **figures(cfg, timings), "peak_mib": memory.mib, "steps": steps}


def baseline(place: Place, envs: str, batch_size: str) -> Found:
    """The plain loop at the same work, in the precision of the best rung; its time per env does not depend on their
    number."""
    cfg = work(place, BEST_PRECISION, int(envs), int(batch_size))
    cfg.sides, cfg.repeats = ["baseline"], 2
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
        "N": cfg.envs, "B": cfg.batch_size, "T": cfg.train_samples, "V": cfg.val_samples, "K": cfg.rows,
        "seconds": total, "training_seconds": training, "eps": cfg.envs / total,
        "images_per_second": (train + val) / total, "train_images_per_second": train / training,
        "repeats": len(timings),
    }  # fmt: skip


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
                    for once in (plain_block(size, dtype, place), kernel_block(kernels, size, dtype, place))
                ]
                key = f"{inputs}->{outputs}, {side}x{side}, B={batch}, {str(dtype).removeprefix('torch.')}"
                found[key] = dict(zip(("torch_ms", "triton_ms"), milliseconds, strict=True))
    return found


def plain_block(size: tuple[int, ...], dtype: torch.dtype, place: Place) -> Callable[[], object]:
    """Forward and backward pass in torch; size: networks, batch, inputs, outputs, side."""
    nets, batch, inputs, outputs, side = size
    x = torch.randn(batch, nets * inputs, side, side, device=place.device).to(dtype)
    leaves = [x.contiguous(memory_format=torch.channels_last).requires_grad_()]
    leaves.append(torch.randn(nets, outputs, inputs, 3, 3, device=place.device).requires_grad_())
    leaves += [torch.full((nets, outputs), value, device=place.device).requires_grad_() for value in (1.0, 0.0)]
    moving = [torch.full((nets * outputs,), value, device=place.device) for value in (0.0, 1.0)]

    def once() -> object:
        inner = PLAIN.conv2d(leaves[0], leaves[1].to(dtype))
        out = F.relu(F.max_pool2d(batched.batch_norm(inner, *leaves[2:], *moving), 2))
        return torch.autograd.grad(out.sum(), leaves)

    return once


def kernel_block(kernels: ModuleType, size: tuple[int, ...], dtype: torch.dtype, place: Place) -> Callable[[], object]:
    """The same by the kernels; kernels: the module blocks.py."""
    nets, batch, inputs, outputs, side = size
    plan = kernels.BlockPlan(0, inputs, inputs, outputs, 3, side, 2, False, -1, -1, 0, 0)
    x = torch.randn(nets, batch, side**2, inputs, device=place.device).to(dtype)
    params = torch.randn(nets, plan.norm_at + 2 * outputs, device=place.device)
    weights = kernels.weights_of(plan, params, torch.ones(nets, 2 * outputs, device=place.device))
    memory, room = kernels.memory_of(plan, nets, batch, x), torch.empty_like(x)
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
    files = ["tests/nets/test_graphs.py"] + ["tests/nets/test_triton_kernels.py"] * (not place.tiny)
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "pytest", *files], cwd=root, capture_output=True, text=True)
    return {"ok": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1:], "output": done.stdout[-2000:]}


TASKS: dict[str, Callable[..., Found]] = {
    "parity": parity, "syncs": syncs, "rung": rung, "baseline": baseline, "blocks": blocks, "tests": tests,
}  # fmt: skip


def main() -> None:
    """Run the task NAME[:argument...]; exit status 1 where it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
