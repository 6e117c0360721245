"""What sleeping seeds, scattered seeds and subset rows cost, each as a ratio measured side by side
in one run.

    python -m benchmarks.sleepers [--envs 16 --batch 125 --train 500 --val 125 --repeats 5]

Prints a table and, last, one JSON line, which is also appended to benchmarks/results/. The work is
one env-step of N `cifar_baseline` hosts on random images that are resident in memory: training
passes and validation, warm-up excluded, the variants interleaved, medians and spreads; engine,
workers and layout are those of a run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import sections
from benchmarks.machine import wait_for
from benchmarks.records import check_folder, command_line, finish, origin
from esper_soa.config import ENGINES, ComputeConfig
from esper_soa.errors import UserError
from esper_soa.nets import data, pools, streams
from esper_soa.nets.choose import choose_engine
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, SlotSpec, TaskConfig, host_slots
from esper_soa.nets.datasets import ImageSet
from esper_soa.nets.engine import Engine, NetsConfig
from esper_soa.nets.host import HostShape, host_shape
from esper_soa.nets.pools import ActiveSeeds
from esper_soa.nets.workers import chunks
from esper_soa.ops.device import (
    apply_threads,
    choose_env_chunk,
    choose_eval_batch,
    choose_workers,
    keep_freed_memory,
    resolve_device,
)
from esper_soa.vocabulary import Blend, Blueprint, Stage

ALPHA = 0.5
NOISE = 512  # images, at least


def noise(options: argparse.Namespace) -> ImageSet:
    """Random images of ten classes, resident."""
    size = max(NOISE, options.val)
    device = options.place
    bytes_ = torch.randint(
        256, (size, IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS), dtype=torch.uint8, device=device
    )
    labels = torch.randint(10, (size,), device=device)
    return ImageSet(
        "noise", bytes_, labels, bytes_, labels, (0.5,) * 3, (0.25,) * 3, "", "random bytes"
    )


class Feeds(NamedTuple):
    """The same images at every env-step, cut as the engine has it."""

    training: data.EnvStepBatches
    validation: data.ValidationImages


def feeds_for(engine: Engine, options: argparse.Namespace) -> Feeds:
    """T images for each env, V that all share."""
    device = options.place
    size = len(options.images.train_labels)
    order = torch.randint(size, (options.envs, options.train), device=device)
    keys = streams.stream_keys(
        0, streams.AUGMENTATION, (0,), torch.arange(options.envs, device=device)
    )
    trained = data.training_bank(options.images)
    tested = data.evaluation_bank(options.images)
    return Feeds(
        data.EnvStepBatches(
            trained, order, keys, 0, options.batch, True, torch.float32, engine.cut
        ),
        data.ValidationImages(
            tested, torch.arange(options.val, device=device), torch.float32, engine.cut
        ),
    )


class Variant(NamedTuple):
    """Networks with a given occupation of their slots."""

    run: Callable[[], None]
    name: str


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
    return choose_engine(ComputeConfig(engine=options.engine), options.place, TaskConfig(), shape)


def variant(
    name: str,
    slots: tuple[SlotSpec, ...],
    active_seeds: ActiveSeeds,
    options: argparse.Namespace,
    what: str,
) -> Variant:
    """Training ("train"), validation ("val") or both ("step") of N such networks."""
    device = options.place
    shape = host_shape(TaskConfig(), slots)
    engine = engine_for(shape, options)
    feeds = feeds_for(engine, options)
    chunk = choose_env_chunk(options.chunk, options.envs, options.batch, device)
    options.workers = choose_workers(0, len(chunks(options.envs, chunk)), device)
    eval_batch = choose_eval_batch(device, engine.chosen.native)
    detached = (Stage.TRAINING, Stage.BLENDING)
    nets = NetsConfig(shape, TaskConfig(), detached, chunk, eval_batch, workers=options.workers)
    envs = torch.arange(options.envs, device=device)
    weights = pools.allocate(shape, options.envs, device, torch.float32)
    pools.initialise_hosts_(weights, shape, streams.stream_keys(0, streams.HOST_INIT, (0,), envs))
    pools.claim_(
        weights, shape, active_seeds, streams.stream_keys(0, streams.SEED_INIT, (0,), envs)
    )
    alpha = torch.as_tensor(np.where(active_seeds.visible, ALPHA, 0.0)).to(device)

    def run() -> None:
        if what != "val":
            engine.train_(
                nets, weights, alpha, active_seeds, feeds.training, options.train // options.batch
            )
        if what != "train":
            engine.validate(nets, weights, alpha, active_seeds, feeds.validation)

    return Variant(run, name)


def clock(action: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, the device waited for."""
    start = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - start


def compare(top: Variant, bottom: Variant, options: argparse.Namespace) -> dict[str, object]:
    """Ratio of two variants, run in turns; the median over repeats of the paired ratio."""
    for one in (top, bottom):
        one.run()
    pairs = [
        (clock(top.run, options.place), clock(bottom.run, options.place))
        for _ in range(options.repeats)
    ]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "top": top.name,
        "bottom": bottom.name,
        "ratio": statistics.median(ratios),
        "low": ratios[0],
        "high": ratios[-1],
        "top_ms": statistics.median(a for a, _ in pairs) * 1e3,
        "bottom_ms": statistics.median(b for _, b in pairs) * 1e3,
    }


def rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """Every comparison of the table."""
    slots = host_slots(TaskConfig())[:3]
    size = (options.envs, len(slots))
    none = np.zeros(size, bool)
    every = np.ones(size, bool)
    scattered = none.copy()
    dense = none.copy()
    quarter = options.envs * len(slots) // 4
    envs = np.arange(quarter)
    scattered[envs * options.envs // quarter, envs % len(slots)] = True
    dense.reshape(-1)[:quarter] = True
    fossil = Stage.FOSSILIZED
    blending = Stage.BLENDING
    return [
        compare(
            variant("3 empty slots", slots, occupied(none, none, blending), options, "step"),
            variant(
                "no slots at all", (), occupied(none[:, :0], none[:, :0], blending), options, "step"
            ),
            options,
        ),
        compare(
            variant(
                "a quarter of the slots, scattered",
                slots,
                occupied(scattered, none, fossil),
                options,
                "step",
            ),
            variant(
                "the same seeds, packed", slots, occupied(dense, none, fossil), options, "step"
            ),
            options,
        ),
        compare(
            variant(
                "validation, 8 subset rows of 3 seeds",
                slots,
                occupied(every, every, blending),
                options,
                "val",
            ),
            variant("validation, one row", slots, occupied(every, none, blending), options, "val"),
            options,
        ),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = command_line(__doc__)
    for name, value in (
        ("envs", 16),
        ("batch", 125),
        ("train", 500),
        ("val", 125),
        ("repeats", 5),
        ("chunk", 0),
    ):
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
    work = {
        name: getattr(options, name)
        for name in ("envs", "batch", "train", "val", "repeats", "chunk", "workers")
    }
    record = origin("sleepers", options.place) | work | {"kernels": used.reason, "rows": table}
    print("\n".join(sections.sleepers([record])))
    finish(record, options.results, "sleepers")


if __name__ == "__main__":
    main()
