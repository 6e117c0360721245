"""What only a GPU can show, each task in a process of its own.

    python -m benchmarks.gpu --visit 1             parity with the CPU; kernels under the sanitizer
    python -m benchmarks.gpu --visit 2             E10 at N=16, 64, 512, time by kernel
    python -m benchmarks.gpu --visit 3             the plain loops and torch's engine at E10
    python -m benchmarks.gpu --visit 4             waits of the host, and all other rungs
    python -m benchmarks.gpu --only parity         those whose names begin so
    python -m benchmarks.gpu --device cpu --tiny   a rehearsal, whose figures mean nothing

E10 is T=4608, V=1000, three live seeds, all eight subsets. A call takes eight minutes at most; each
task is a JSON line of gpu.jsonl in the results, and what is there of the same sources and machine
is not done again. Status 3: give the command again. Needs no network and no git. Results and
compiled kernels go to the folder $OUT where that is set, and --resume brings those of an earlier
call; else to benchmarks/results, or to build/gpu where the files are not those of a commit.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import eps, machine
from benchmarks.eps_config import EpsConfig
from benchmarks.processes import ROOT
from benchmarks.records import (
    RESULTS,
    check_folder,
    clean,
    command_line,
    keep,
    kept,
    markdown,
    origin,
)
from benchmarks.sides import EngineSide
from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets.graphs import StepCache
from esper_soa.runtime.device import resolve_device
from esper_soa.system.errors import UserError

# Settings of the engine by rung of the ladder; "default" is what a run gets that asks for nothing.
BEST = "triton+graphs"
BEST_PRECISION = f"{BEST}+bfloat16"  # the rung whose precision the plain loop has too
RUNGS = ("default", "eager", "compiled", "graphs", "triton", BEST, BEST_PRECISION)
ENVS = 64
CROWDS = (16, 64, 512)  # numbers of envs of the best rung
TOOLS = ("memcheck", "racecheck")
SANITIZER = "compute-sanitizer"
FOUND_FAULTS = 9  # exit status of the sanitizer
KERNELS_SHOWN = 40
BATCHES = (32, 512)
BASELINE_ENVS = 8  # the plain loop takes as long per env whatever their number
BANK = 16_384  # training images, 157 MB: more than the cache of any GPU
TOLERANCE = 1e-3  # relative distance of weights after a few steps on two devices
SHORT = 1e-2  # distance in 16 bits, beyond twice that of a CPU in bfloat16
PART = 470  # seconds of a call
MORE = 3  # exit status
# The one wait of an env-step, of engines that launch nothing for seeds that do not run; and what a
# GPU is not waited for: its SGD reads no learning rate, the numbers of the progress bar come late.
READ = "read_active_seeds"
NOT_ON_GPU = ("sgd_", "read_progress")
Found = dict[str, object]


class Place(NamedTuple):
    """Where a task runs, and whether it is a rehearsal."""

    device: torch.device
    tiny: bool


def visits() -> list[list[str]]:
    """Tasks by visit in order of weight: where time runs out, the last wait for the next call."""
    small, large = BATCHES
    parities = [f"parity:{rung}" for rung in reversed(RUNGS) if rung != "compiled"]
    first = [*parities[:2], *(f"sanitize:{tool}" for tool in TOOLS), *parities[2:]]
    second = [f"rung:{BEST_PRECISION}:{envs}:{small}" for envs in CROWDS]
    third = [f"{loop}:{BASELINE_ENVS}:{small}" for loop in ("baseline", "bare")]
    third += [f"rung:{rung}:{ENVS}:{small}" for rung in ("eager", "compiled", "graphs")]
    fourth = ["syncs:default", f"syncs:{BEST}"]
    fourth += [f"rung:{rung}:{ENVS}:{small}" for rung in ("default", "triton", BEST)]
    fourth += [f"rung:{BEST}:1:{small}", f"baseline:{BASELINE_ENVS}:{large}"]
    fourth += [f"rung:{rung}:{ENVS}:{large}" for rung in RUNGS]
    return [first, second, third, fourth]


def compute_of(rung: str, place: Place) -> ComputeConfig:
    """The settings of a rung."""
    if rung == "default":
        return ComputeConfig()
    parts = rung.split("+")
    replayed = place.device.type == "cuda" and "graphs" in parts
    engine = "triton" if "triton" in parts else "torch"
    return ComputeConfig(
        compile="on" if rung == "compiled" else "off",
        cuda_graphs="on" if replayed else "off",
        workers=1,
        precision="bfloat16" if "bfloat16" in parts else "float32",
        engine="triton_graphs" if replayed and engine == "triton" else engine,
    )


def work(place: Place, rung: str, envs: int, batch: int) -> EpsConfig:
    """E10: what ten hosts get of CIFAR-10 in the reference, three live seeds, all eight subsets."""
    sizes: dict = {"envs": envs, "batch_size": batch, "train_samples": 4608, "val_samples": 1000}
    sizes |= {"live": 3, "bank": BANK, "timed_steps": 1, "warmup": 4, "repeats": 3}
    device: dict = {"device": str(place.device), "compute": compute_of(rung, place)}
    cfg = EpsConfig(name="gpu", sides=["engine"], limits=False, **sizes, **device)
    if place.tiny:
        cfg = replace(cfg, envs=min(envs, 2), batch_size=2, train_samples=4, val_samples=4)
        cfg = replace(cfg, bank=64, repeats=2, warmup=3, steps=10, update=False)
        cfg.task.base_channels = 2
    if place.tiny and "triton" in rung:  # its interpreter takes a quarter of a minute per env-step
        cfg = replace(cfg, envs=1, train_samples=2, val_samples=2, warmup=2)
    return cfg


def side_at(place: Place, rung: str, cfg: EpsConfig) -> EngineSide:
    """The engine of a work; rehearsed, its steps lie on static buffers as for graphs."""
    side = EngineSide(cfg)
    if place.device.type == "cpu" and "graphs" in rung:
        side.world.kernels = side.world.kernels._replace(steps=StepCache(capture=False))
        if isinstance(side.agent, RecurrentPolicy) and side.learner is not None:
            side.agent.steps = StepCache(capture=False)
            side.learner.steps = StepCache(capture=False)
    return side


def parity(place: Place, rung: str) -> Found:
    """Weights and accuracies after a few env-steps on this device and on the CPU in plain torch."""
    # Triton's kernels read this switch too.
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    cpu = Place(torch.device("cpu"), place.tiny)
    plain = played(cpu, "eager")
    side = played(place, rung)
    tolerance = TOLERANCE
    if side.world.rules.setup.precision != torch.float32:
        tolerance = SHORT + 2 * weights_apart(played(cpu, "eager+bfloat16"), plain)
    distance = weights_apart(side, plain)
    a, b = (there.episode.env.state.signals.val_accuracy.cpu() for there in (plain, side))
    apart = float((a - b).abs().max())
    found: Found = {"distance": distance, "tolerance": tolerance, "accuracy_apart": apart}
    return {"ok": distance < tolerance, **found, **chosen(side)}


def played(place: Place, rung: str) -> EngineSide:
    """Four hosts after a few env-steps; one in a rehearsal, as kernels are interpreted there."""
    cfg = work(place, rung, 1 if place.tiny else 4, 32)
    size = 2 if place.tiny else 64
    cfg = replace(cfg, train_samples=size, val_samples=size, update=not place.tiny)
    side = side_at(place, rung, replace(cfg, warmup=2 if place.tiny else cfg.warmup))
    side.warm_up()
    return side


def weights_apart(side: EngineSide, reference: EngineSide) -> float:
    """The largest relative distance of any kind of weights."""
    wanted = reference.world.weights.flatten_keys(".")
    return max(
        float((value.cpu() - wanted[name].cpu()).norm() / wanted[name].cpu().norm().clamp(min=1.0))
        for name, value in side.world.weights.flatten_keys(".").items()
        if value.is_floating_point() and name in wanted
    )


def chosen(side: EngineSide) -> Found:
    """What the engine is, and what decides as graphs."""
    return {
        "engine": side.world.rules.engine.chosen.facts(),
        "graphs": side.world.kernels.replay.facts(),
    }


def syncs(place: Place, rung: str) -> Found:
    """Waits of the host for the device as all seeds are born, and in the env-step after it."""
    side = side_at(place, rung, work(place, rung, 4, 32))
    side.warm_up()
    side.begin()
    births, steady = waits(side, place.device)
    allowed = 0 if side.world.rules.engine.chosen.name.startswith("triton") else 1
    fine = max(births, steady) <= allowed
    return {"ok": fine, "births": births, "steady": steady, "allowed": allowed}


def waits(side: EngineSide, device: torch.device) -> tuple[int, int]:
    """Waits of the next two env-steps; rehearsed on a CPU, those outside of READ raise."""
    if device.type != "cpu":
        first = machine.count_syncs(side.one_step, device)
        return first, machine.count_syncs(side.one_step, device)
    with SyncGuard([READ, *NOT_ON_GPU]) as guard:
        side.one_step()
        first = len(guard.log)
        side.one_step()
    read = [sync.function.split(".")[-1] == READ for sync in guard.log]
    return sum(read[:first]), sum(read[first:])


def rung(place: Place, name: str, envs: str, batch: str) -> Found:
    """EPS and images per second of the engine at E10."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    cfg = work(place, name, int(envs), int(batch))
    side = side_at(place, name, cfg)
    machine.forget_peak(place.device)
    side.warm_up()
    timings = [side.run() for _ in range(cfg.repeats)]
    peak = machine.peak(place.device) / machine.MIB
    found = {"ok": True, **figures(cfg, timings), "peak_mib": peak, **chosen(side)}
    return found | {"kernels": kernel_times(side, place.device)}


def kernel_times(side: EngineSide, device: torch.device) -> list[Found]:
    """What takes most time in an env-step, by name of the kernel: launches and milliseconds."""
    on_gpu = device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        side.one_step()
        machine.wait_for(device)
    rows = [
        (row.key, row.count, row.self_device_time_total if on_gpu else row.self_cpu_time_total)
        for row in profiler.key_averages()
    ]
    largest = sorted(rows, key=lambda row: -row[2])[:KERNELS_SHOWN]
    return [{"kernel": key, "launches": many, "ms": time / 1e3} for key, many, time in largest]


def sanitize(place: Place, tool: str) -> Found:
    """A pass of the Triton kernels under a tool of NVIDIA's sanitizer, which a CPU has none of."""
    path = shutil.which(SANITIZER)
    on_gpu = place.device.type == "cuda"
    if on_gpu and path is None:
        return {"ok": False, "error": f"{SANITIZER}, of the CUDA toolkit, is not on PATH"}
    prefix = [str(path), "--tool", tool, "--error-exitcode", str(FOUND_FAULTS)] * on_gpu
    command = [sys.executable, "-m", "benchmarks.gpu", "few:triton"]
    command += ["--tiny", "--device", str(place.device)]
    done = subprocess.run([*prefix, *command], cwd=ROOT, capture_output=True, text=True)
    error = {"error": (done.stdout + done.stderr)[-3000:]} if done.returncode else {}
    return {"ok": done.returncode == 0, **error}


def few(place: Place, rung: str) -> Found:
    """As few env-steps as there can be."""
    return {"ok": True, **chosen(played(place, rung))}


def baseline(name: str, place: Place, envs: str, batch: str) -> Found:
    """A plain loop, or bare hosts, at the same work, in the precision of the best rung."""
    cfg = work(place, BEST_PRECISION, int(envs), int(batch))
    cfg = replace(cfg, sides=[name], repeats=2, live=0 if name == "bare" else cfg.live)
    with ExitStack() as stack:
        loop = eps.Contestant(name, cfg, stack)
        timings = [loop.side.run() for _ in range(cfg.repeats)]
    return {"ok": True, **figures(cfg, timings), "notes": loop.notes}


def figures(cfg: EpsConfig, timings: list) -> Found:
    """The work, and medians over the timings."""
    total = sorted(timing.figures["all"] for timing in timings)[len(timings) // 2]
    return {
        "work": {"N": cfg.envs, "B": cfg.batch_size, "T": cfg.train_samples, "V": cfg.val_samples},
        "K": cfg.rows,
        "seconds": total,
        "eps": cfg.envs / total,
        "images_per_second": sum(cfg.images) / total,
        "repeats": len(timings),
    }


TASKS: dict[str, Callable[..., Found]] = {
    "parity": parity,
    "syncs": syncs,
    "rung": rung,
    "baseline": partial(baseline, "baseline"),
    "bare": partial(baseline, "bare"),
    "sanitize": sanitize,
    "few": few,
}


def in_process(name: str, place: Place, seconds: float) -> Found:
    """What the task finds in a process of its own; "ok", and "error" where it is not."""
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--device", str(place.device)]
    command += ["--tiny"] * place.tiny
    caches = {}
    if out := os.environ.get("OUT"):  # what is compiled is kept there too
        caches = {"TRITON_CACHE_DIR": f"{out}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{out}/inductor"}
    given: dict = {"cwd": ROOT, "env": os.environ | caches, "timeout": seconds}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **given)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not done after {seconds:.0f} s", "cut_off": True}
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return {"ok": False, "error": done.stderr[-3000:] or "no output"}


def show(records: dict[str, Found]) -> None:
    """A row per task, for people."""
    rows = []
    for name, record in records.items():
        loop = records.get(f"baseline:{BASELINE_ENVS}:{name.split(':')[-1]}", {}).get("eps")
        eps = record.get("eps")
        speeds = ("", "")
        if isinstance(eps, float):
            speeds = f"{eps:.1f}", f"{eps / loop:.2f}" if isinstance(loop, float) else ""
        verdict = "ok" if record["ok"] else f"FAILED: {record.get('error', record)}"
        rows.append((name, *speeds, str(record.get("distance", "")), verdict))
    heads = "task | EPS | over the plain loop | distance of weights | verdict"
    print("\n".join(markdown(heads, rows)))


def play_all(place: Place, options: argparse.Namespace) -> int:
    """Do what is not done yet while there is time; the exit status."""
    check_folder(options.results)
    if options.resume and options.results:
        shutil.copytree(options.resume, options.results, dirs_exist_ok=True)
    head = origin("gpu", place.device)
    head |= {"tiny": place.tiny, "sources": machine.sources_digest()}
    same = {key: head[key] for key in ("sources", "machine", "tiny")}
    records = {
        record["task"]: record["found"]
        for record in kept(Path(options.results)).get("gpu", []) * bool(options.results)
        if same.items() <= record.items()
    }
    ending = time.monotonic() + options.seconds
    chosen_visits = visits()[options.visit - 1 :][:1] if options.visit else visits()
    names = [name for visit in chosen_visits for name in visit]
    wanted = [name for name in names if name.startswith(options.only)]
    todo = [name for name in wanted if name not in records]
    for name in todo:
        found = in_process(name, place, max(ending - time.monotonic(), 1.0))
        if found.get("cut_off") and name != todo[0]:  # which would not get more the next time
            break
        records[name] = found
        if options.results:
            keep(head | {"task": name, "found": found}, options.results, "gpu")
        print(f"{name}: {'ok' if found['ok'] else 'failed'}", flush=True)
    show(records)
    left = sum(name not in records for name in wanted)
    if left:
        print(f"{left} of {len(wanted)} tasks are left: give the command again", file=sys.stderr)
        return MORE
    return 0 if all(record["ok"] for record in records.values()) else 1


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all went well, 1 a task failed, 2 there is no GPU, 3 there is more to do."""
    parser = command_line(__doc__)
    folder = RESULTS if clean(machine.git_commit()) else ROOT / "build" / "gpu"
    parser.set_defaults(results=os.environ.get("OUT", str(folder)))
    parser.add_argument("task", nargs="?", help="one task, in this process; prints a JSON line")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--visit", type=int, choices=(1, 2, 3, 4), help="its tasks alone")
    parser.add_argument("--resume", default="", help="folder of an earlier call's results")
    parser.add_argument("--only", default="", help="tasks whose names begin with this")
    parser.add_argument("--seconds", type=float, default=PART, help="time of this call")
    options = parser.parse_args(arguments)
    try:
        place = Place(resolve_device(options.device), options.tiny)
        if place.device.type != "cuda" and not options.tiny:
            raise UserError("on a CPU this can only be rehearsed: add --tiny")
        if options.task is None:
            return play_all(place, options)
        task, *rest = options.task.split(":")
        found = TASKS[task](place, *rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
