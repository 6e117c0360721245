"""What sleeping seeds, scattered seeds and subset rows cost, each as a ratio measured side by side in one run.

    python -m benchmarks.sleepers [--envs 16 --batch 125 --train 500 --val 125 --repeats 5]

Prints a table and, last, one JSON line, which is also appended to benchmarks/results/. The work is one env-step of N
`cifar_baseline` hosts on random images that are resident in memory: training passes and validation, warm-up excluded,
the variants interleaved, medians and spreads; kernels, workers and layout are those of a run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import wait_for
from benchmarks.records import RESULTS, check_folder, keep, origin
from esper_soa.errors import UserError
from esper_soa.nets import pools, streams
from esper_soa.nets.config import SlotSpec, TaskConfig, host_slots
from esper_soa.nets.engines.cpu import switch
from esper_soa.nets.engines.torch.training import NetsConfig, chunks, train_epoch_
from esper_soa.nets.engines.torch.validation import evaluate
from esper_soa.nets.host import host_shape
from esper_soa.nets.pools import Roster
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


class Feed:
    """Random images, resident; the same batch for every training step."""

    crops = None  # images come from no bank

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        shape = (options.batch, options.envs * 3, 32, 32)
        self.images = torch.randn(shape, device=device)
        self.labels = torch.randint(10, (options.batch, options.envs), device=device)
        test = torch.randn(options.val, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        self.validation = (test, torch.randint(10, (options.val, 1), device=device))
        self.by_count: dict[int, Tensor] = {}

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """The first n networks' images stand for any n networks."""
        count = envs.shape[0]
        if count not in self.by_count:
            self.by_count[count] = self.images[:, : count * 3].contiguous(memory_format=torch.channels_last)
        return self.by_count[count], self.labels[:, :count]

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The validation images, at most `size` at a time."""
        images, labels = self.validation
        return list(zip(images.split(size), labels.split(size), strict=True))


class Variant(NamedTuple):
    """Networks with a given occupation of their slots."""

    run: Callable[[], None]
    name: str


def occupied(live: np.ndarray, ablated: np.ndarray, stage: int) -> Roster:
    """A roster with conv_light seeds blended by ADD where `live`."""
    no = np.zeros_like(live)
    blueprint = np.where(live, Blueprint.CONV_LIGHT, Blueprint.NONE)
    stages = np.where(live, stage, Stage.EMPTY)
    return Roster(live, stages, blueprint, np.full(live.shape, Blend.ADD), no, live, ablated, live, live)


def variant(name: str, slots: tuple[SlotSpec, ...], roster: Roster, options: argparse.Namespace, what: str) -> Variant:
    """Training ("train"), validation ("val") or both ("step") of N networks as `roster` says."""
    device = options.place
    shape = host_shape(TaskConfig(), slots)
    chunk = choose_env_chunk(options.chunk, options.envs, options.batch, device)
    options.workers = choose_workers(0, len(chunks(options.envs, chunk)), device)
    eval_batch = choose_eval_batch(device, switch.current().native)
    detached = (Stage.TRAINING, Stage.BLENDING)
    nets = NetsConfig(shape, TaskConfig(), detached, chunk, eval_batch, workers=options.workers)
    envs = torch.arange(options.envs, device=device)
    weights = pools.allocate(shape, options.envs, device, torch.float32)
    pools.initialise_hosts_(weights, shape, streams.stream_keys(0, streams.HOST_INIT, (0,), envs))
    pools.claim_(weights, shape, roster, streams.stream_keys(0, streams.SEED_INIT, (0,), envs))
    alpha = torch.as_tensor(np.where(roster.visible, ALPHA, 0.0)).to(device)

    def run() -> None:
        if what != "val":
            train_epoch_(nets, weights, alpha, roster, options.feed, options.train // options.batch)
        if what != "train":
            evaluate(nets, weights, alpha, roster, options.feed)

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
    pairs = [(clock(top.run, options.place), clock(bottom.run, options.place)) for _ in range(options.repeats)]
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
    none, every = np.zeros(size, bool), np.ones(size, bool)
    scattered, dense = none.copy(), none.copy()
    quarter = options.envs * len(slots) // 4
    envs = np.arange(quarter)
    scattered[envs * options.envs // quarter, envs % len(slots)] = True
    dense.reshape(-1)[:quarter] = True
    fossil, blending = Stage.FOSSILIZED, Stage.BLENDING
    return [
        compare(
            variant("3 empty slots", slots, occupied(none, none, blending), options, "step"),
            variant("no slots at all", (), occupied(none[:, :0], none[:, :0], blending), options, "step"), options,
        ),
        compare(
            variant("a quarter of the slots, scattered", slots, occupied(scattered, none, fossil), options, "step"),
            variant("the same seeds, packed", slots, occupied(dense, none, fossil), options, "step"), options,
        ),
        compare(
            variant("validation, 8 subset rows of 3 seeds", slots, occupied(every, every, blending), options, "val"),
            variant("validation, one row", slots, occupied(every, none, blending), options, "val"), options,
        ),
    ]  # fmt: skip


def naive_share(first: dict[str, object]) -> float:
    """Share of 8 separate full passes that the 8 rows cost."""
    return float(str(first["ratio"])) / 8


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("envs", 16), ("batch", 125), ("train", 500), ("val", 125), ("repeats", 5), ("chunk", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--native", choices=("auto", "on", "off"), default="auto", help="as compute.native of a run")
    parser.add_argument("--results", default=str(RESULTS), help="folder of the results; '' = only print them")
    options = parser.parse_args(arguments)
    try:
        check_folder(options.results)
        options.place = resolve_device(options.device)
        used = switch.choose(options.native, options.place)
    except UserError as error:
        sys.exit(f"error: {error}")
    apply_threads(0)
    keep_freed_memory(options.place)
    options.feed = Feed(options, options.place)
    table = rows(options)
    print(f"N={options.envs} B={options.batch} T={options.train} V={options.val}, median of {options.repeats} pairs, "
          f"kernels {used.reason}")  # fmt: skip
    for row in table:
        print(f"{row['ratio']:6.2f} [{row['low']:.2f}, {row['high']:.2f}]  {row['top']} ({row['top_ms']:.0f} ms) over "
              f"{row['bottom']} ({row['bottom_ms']:.0f} ms)")  # fmt: skip
    print(f"{naive_share(table[-1]):6.2f}  of 8 separate validation passes")
    work = {name: getattr(options, name) for name in ("envs", "batch", "train", "val", "repeats", "chunk", "workers")}
    record = origin("sleepers", options.place) | work | {"kernels": used.reason, "rows": table}
    if options.results:
        keep(record, options.results, "sleepers")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
