"""What sleeping seeds, scattered seeds and subset rows cost, each as a ratio measured side by side
in one run.

    python -m benchmarks.sleepers [--envs 16 --batch 125 --train 500 --val 125 --repeats 5]

Prints a table and, last, one JSON line, which is also appended to benchmarks/results/. The work is
one env-step of N `cifar_baseline` hosts on random images in memory; engine, workers and layout are
those of a run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import sections
from benchmarks.machine import wait_for
from benchmarks.records import Record, check_folder, command_line, finish, origin
from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, TaskConfig, host_slots
from esper_soa.config.settings import ENGINES
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.data.batches import Draw
from esper_soa.nets.data.datasets import ImageSet, synthetic
from esper_soa.nets.data.images import IMAGES
from esper_soa.nets.engine import Engine, NetsConfig, Sizes
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.seeds import pools
from esper_soa.nets.seeds.pools import ActiveSeeds
from esper_soa.nets.trial import Trial
from esper_soa.runtime.device import (
    apply_threads,
    choose_env_chunk,
    choose_eval_batch,
    choose_workers,
    keep_freed_memory,
    resolve_device,
)
from esper_soa.system import streams
from esper_soa.system.errors import UserError
from esper_soa.system.threads import chunks
from esper_soa.vocabulary import Blend, Blueprint, Stage

ALPHA = 0.5
NOISE = 512  # images, at least

Named = tuple[str, ActiveSeeds]


def noise(options: argparse.Namespace) -> ImageSet:
    """Random images of ten classes, resident."""
    size = max(NOISE, options.val)
    device = options.place
    bytes_ = torch.randint(
        256, (size, IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS), dtype=torch.uint8, device=device
    )
    labels = torch.randint(10, (size,), device=device)
    parts = (bytes_, labels) * 3
    return ImageSet("noise", *parts, (0.5,) * 3, (0.25,) * 3, "", "random bytes")


def occupied(live: np.ndarray, ablated: np.ndarray, stage: int) -> ActiveSeeds:
    """Active seeds with conv_light seeds blended by ADD where `live`."""
    no = np.zeros_like(live)
    blueprint = np.where(live, Blueprint.CONV_LIGHT, Blueprint.NONE)
    stages = np.where(live, stage, Stage.EMPTY)
    return ActiveSeeds(
        live, stages, blueprint, np.full(live.shape, Blend.ADD), no, live, ablated, live, live
    )


def engine_for(shape: HostShape, options: argparse.Namespace) -> Engine:
    """What runs hosts of `shape` in a run."""
    nets = NetsConfig(shape, TaskConfig(), (), options.envs, 1)
    sizes = Sizes(options.envs, options.batch, options.train, options.val)
    trial = Trial(nets, options.place, sizes, IMAGES, synthetic)
    return choose_engine(options.engine, trial)


def variant(
    active_seeds: ActiveSeeds, what: str, options: argparse.Namespace
) -> Callable[[], None]:
    """Validation ("val") or training too ("step") of N networks on the same images."""
    device = options.place
    slots = host_slots(TaskConfig())[: active_seeds.visible.shape[1]]
    shape = host_shape(TaskConfig(), slots)
    engine = engine_for(shape, options)
    envs = torch.arange(options.envs, device=device)
    order = torch.randint(
        len(options.images.train_labels), (options.envs, options.train), device=device
    )
    keys = streams.stream_keys(0, streams.AUGMENTATION, (0,), envs)
    draw = Draw(order, keys, 0, options.batch, True)
    training = options.images.training(draw, torch.float32)
    shared = torch.arange(options.val, device=device)
    validation = options.images.validation(shared, torch.float32)
    chunk = choose_env_chunk(options.chunk, options.envs, options.batch, device)
    options.workers = choose_workers(0, len(chunks(options.envs, chunk)), device)
    eval_batch = choose_eval_batch(device)
    detached = (Stage.TRAINING, Stage.BLENDING)
    nets = NetsConfig(shape, TaskConfig(), detached, chunk, eval_batch, workers=options.workers)
    weights = pools.allocate(shape, options.envs, device, torch.float32)
    pools.initialise_hosts_(weights, shape, streams.stream_keys(0, streams.HOST_INIT, (0,), envs))
    born = streams.stream_keys(0, streams.SEED_INIT, (0,), envs)
    pools.claim_(weights, shape, active_seeds, born)
    alpha = torch.as_tensor(np.where(active_seeds.visible, ALPHA, 0.0)).to(device)

    def run() -> None:
        if what == "step":
            batches = options.train // options.batch
            engine.train_(nets, weights, alpha, active_seeds, training, batches)
        engine.validate(nets, weights, alpha, active_seeds, validation)

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
    one = occupied(every, none, Stage.BLENDING)
    apart = occupied(scattered, none, Stage.FOSSILIZED)
    packed = occupied(dense, none, Stage.FOSSILIZED)
    pairs = (
        ("step", ("3 empty slots", empty), ("no slots at all", slotless)),
        ("step", ("a quarter of the slots, scattered", apart), ("the same seeds, packed", packed)),
        ("val", ("validation, 8 subset rows of 3 seeds", eight), ("validation, one row", one)),
    )
    return [compare(*pair, options) for pair in pairs]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = command_line(__doc__)
    sizes = {"envs": 16, "batch": 125, "train": 500, "val": 125, "repeats": 5, "chunk": 0}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--engine", choices=ENGINES, default="auto", help="as compute.engine of a run"
    )
    options = parser.parse_args(arguments)
    try:
        check_folder(options.results)
        options.place = resolve_device(options.device)
        used = engine_for(host_shape(TaskConfig(), ()), options).chosen
    except UserError as error:
        sys.exit(f"error: {error}")
    apply_threads(0)
    keep_freed_memory(options.place)
    options.images = noise(options)
    table = rows(options)
    work = {name: getattr(options, name) for name in (*sizes, "workers")}
    record = origin("sleepers", options.place) | work | {"kernels": used.reason, "rows": table}
    print("\n".join(sections.sleepers([record])))
    finish(record, options.results, "sleepers")


if __name__ == "__main__":
    main()
