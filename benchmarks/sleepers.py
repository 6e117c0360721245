"""What sleeping seeds, scattered seeds and subset rows cost, each as a ratio measured side by side
in one run.

    python -m benchmarks.sleepers [--envs 16 --batch 125 --train 500 --val 125 --repeats 5]

Prints a table and, last, one JSON line, which is also appended to benchmarks/results/. The work is
one env-step of N `cifar_baseline` hosts on synthetic images; engine, workers and layout are those
of a run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import sections
from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import wait_for
from benchmarks.records import Record, command_line, origin, report
from esper_soa.config.nets import TaskConfig, host_slots
from esper_soa.config.settings import ENGINES, ComputeConfig
from esper_soa.env.world import World
from esper_soa.nets.model.host import host_shape
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.system import streams
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import Blend, Blueprint, Stage

ALPHA = 0.5
# numbers of the command line; chunk 0 is that of a run
SIZES = {"envs": 16, "batch": 125, "train": 500, "val": 125, "repeats": 5, "chunk": 0}

Named = tuple[str, ActiveSeeds]


def occupied(live: np.ndarray, ablated: np.ndarray, stage: int) -> ActiveSeeds:
    """Active seeds with conv_light seeds blended by ADD where `live`."""
    no = np.zeros_like(live)
    blueprint = np.where(live, Blueprint.CONV_LIGHT, Blueprint.NONE)
    stages = np.where(live, stage, Stage.EMPTY)
    return ActiveSeeds(
        live, stages, blueprint, np.full(live.shape, Blend.ADD), no, live, ablated, live, live
    )


def build(options: argparse.Namespace) -> World:
    """Hosts with three slots, images, engine and layout, as a run has them."""
    sizes: dict = {"envs": options.envs, "batch_size": options.batch}
    sizes |= {"train_samples": options.train, "val_samples": options.val}
    compute = ComputeConfig(engine=options.engine, env_chunk=options.chunk)
    cfg = EpsConfig(device=options.device, steps=3, compute=compute, **sizes)
    return build_world(train_config(cfg), resolve_device(options.device))


def variant(
    active_seeds: ActiveSeeds, what: str, options: argparse.Namespace
) -> Callable[[], None]:
    """Validation ("val") or training too ("step") of N networks on the same images."""
    world = build(options)
    slots = host_slots(TaskConfig())[: active_seeds.visible.shape[1]]
    nets = world.setup._replace(shape=host_shape(TaskConfig(), slots))
    engine = world.rules.engine
    work = world.work(0)
    weights = pools.allocate(nets.shape, options.envs, world.device, torch.float32)
    pools.initialise_hosts_(weights, nets.shape, world.keys(streams.HOST_INIT))
    active = engine.claim_(nets, weights, active_seeds.resident(world.device), work.seed_keys)
    alpha = torch.as_tensor(np.where(active_seeds.visible, ALPHA, 0.0)).to(world.device)
    given = nets, weights, alpha, active

    def run() -> None:
        if what == "step":
            engine.train_(*given, work.training, work.num_batches)
        engine.validate(*given, work.validation)

    return run


def clock(action: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one call, the device waited for."""
    start = time.perf_counter()
    action()
    wait_for(device)
    return 1e3 * (time.perf_counter() - start)


def compare(what: str, top: Named, bottom: Named, options: argparse.Namespace) -> Record:
    """Ratio of two variants, run in turns; the median over repeats of the paired ratio."""
    runs = [variant(active_seeds, what, options) for _, active_seeds in (top, bottom)]
    times = [[clock(run, options.place) for run in runs] for _ in range(options.repeats + 1)][1:]
    ratios = [a / b for a, b in times]
    return {
        "top": top[0],
        "bottom": bottom[0],
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "top_ms": statistics.median(a for a, _ in times),
        "bottom_ms": statistics.median(b for _, b in times),
    }


def rows(options: argparse.Namespace) -> list[Record]:
    """Every comparison of the table."""
    none = np.zeros((options.envs, 3), bool)
    every = ~none
    scattered = none.copy()
    dense = none.copy()
    quarter = none.size // 4
    envs = np.arange(quarter)
    scattered[envs * options.envs // quarter, envs % 3] = True
    dense.reshape(-1)[:quarter] = True
    empty = occupied(none, none, Stage.BLENDING)
    slotless = occupied(none[:, :0], none[:, :0], Stage.BLENDING)
    eight = occupied(every, every, Stage.BLENDING)
    single = occupied(every, none, Stage.BLENDING)
    apart = occupied(scattered, none, Stage.FOSSILIZED)
    packed = occupied(dense, none, Stage.FOSSILIZED)
    pairs = (
        ("step", ("3 empty slots", empty), ("no slots at all", slotless)),
        ("step", ("a quarter of the slots, scattered", apart), ("the same seeds, packed", packed)),
        ("val", ("validation, 8 subset rows of 3 seeds", eight), ("validation, one row", single)),
    )
    return [compare(*pair, options) for pair in pairs]


def measure(options: argparse.Namespace) -> Record:
    """The record of all comparisons."""
    apply_threads(0)
    world = build(options)
    options.place = world.device
    facts = {"kernels": world.rules.engine.chosen.reason, "workers": world.setup.workers}
    facts |= {name: getattr(options, name) for name in SIZES}
    return origin("sleepers", world.device) | facts | {"rows": rows(options)}


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="auto")
    words = "as compute.engine of a run"
    parser.add_argument("--engine", choices=ENGINES, default="auto", help=words)
    report(parser.parse_args(), measure, sections.sleepers)


if __name__ == "__main__":
    main()
