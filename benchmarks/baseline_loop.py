"""The same work as the stacked engine, one env after the other: the opponent in benchmarks.

`python -m benchmarks.baseline_loop --envs 8 --batch 32 --train 256 --val 256 --live 3` prints env-steps per second
with all that they depend on, and a JSON line last. Random images lie on the device; warm-up is not counted.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.baseline_env import BaselineEnv, ScalarAction
from esper_soa.env.config import GatesConfig, LifecycleConfig
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, TaskConfig
from esper_soa.vocabulary import BLUEPRINT_NAMES, Op, Stage

LIVE_ALPHA = 0.5  # of the blended seeds of a benchmark
SLOTS = ["r0c0", "r0c1", "r0c2"]

Images = tuple[Tensor, Tensor]  # images [n, 3, 32, 32] and labels [n]


@dataclass
class Workload:
    """What is timed; images are counted per env and env-step."""

    envs: int = 8
    batch: int = 32
    train: int = 256
    val: int = 256
    live: int = 0  # seeds in BLENDING at alpha 0.5, so that 2^live subsets are evaluated
    blueprint: str = "conv_light"
    steps: int = 5  # timed rounds of one env-step per env
    warmup: int = 2
    validation: str = "auto"  # "fused": all subsets in one pass, best on a GPU; "separate": best in a CPU's caches
    device: str = "cpu"
    threads: int = 1
    seed: int = 0

    @property
    def fused(self) -> bool:
        """All subsets go through the host in one pass."""
        return self.validation == "fused" or (self.validation == "auto" and self.device != "cpu")


def make_env(work: Workload) -> BaselineEnv:
    """An env with `work.live` blended seeds whose alphas stand still."""
    env = BaselineEnv(TaskConfig(), SLOTS, LifecycleConfig(), GatesConfig(), device=work.device)
    for slot in range(work.live):
        env.apply(ScalarAction(slot=slot, blueprint=BLUEPRINT_NAMES.index(work.blueprint), op=Op.GERMINATE))
        machine = env.machines[slot]
        machine.seed.stage = Stage.BLENDING
        machine.seed.alpha = machine.ramp.alpha = machine.ramp.start = machine.ramp.target = LIVE_ALPHA
    return env


def random_images(count: int, device: str) -> Images:
    """Images [count, 3, 32, 32] in channels_last, and labels [count]."""
    images = torch.randn(count, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE, device=device)
    return images.to(memory_format=torch.channels_last), torch.randint(
        TaskConfig().num_classes, (count,), device=device
    )


def shuffled_batches(images: Tensor, labels: Tensor, batch: int) -> list[tuple[Tensor, Tensor]]:
    """A random order of the images, in whole batches."""
    order = torch.randperm(len(labels), device=labels.device)
    return [(images[rows], labels[rows]) for rows in order.split(batch) if len(rows) == batch]


def round_seconds(
    envs: list[BaselineEnv], work: Workload, train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor]
) -> float:
    """Seconds for one env-step of every env."""
    started = time.perf_counter()
    for env in envs:
        trained = env.train(shuffled_batches(*train, work.batch))
        evaluate = env.evaluate_fused if work.fused else env.evaluate
        evaluated = evaluate(list(zip(val[0].split(work.batch), val[1].split(work.batch), strict=True)))
        env.record(trained, evaluated)
        env.apply(ScalarAction())
        env.tick()
    return time.perf_counter() - started


def run_baseline(work: Workload) -> dict[str, object]:
    """Env-steps per second (median round) beside everything they depend on."""
    torch.manual_seed(work.seed)
    torch.set_num_threads(work.threads)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    envs = [make_env(work) for _ in range(work.envs)]
    train, val = random_images(work.train, work.device), random_images(work.val, work.device)
    for _ in range(work.warmup):
        round_seconds(envs, work, train, val)
    seconds = [round_seconds(envs, work, train, val) for _ in range(work.steps)]
    eps = work.envs / statistics.median(seconds)
    return {
        "name": "baseline_loop",
        "eps": round(eps, 3),
        "images_per_second": round(eps * (work.train // work.batch * work.batch + work.val * 2**work.live), 1),
        "N": work.envs, "B": work.batch, "T": work.train // work.batch * work.batch, "V": work.val,
        "K": 2**work.live, "live": work.live, "blueprint": work.blueprint, "fused": work.fused,
        "device": work.device, "threads": work.threads, "torch": torch.__version__,
        "seconds": [round(each, 4) for each in seconds],
    }  # fmt: skip


def main() -> None:
    """Command line: every field of Workload is an option."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Workload()
    for name in ("envs", "batch", "train", "val", "steps", "warmup", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, default=vars(default)[name])
    parser.add_argument("--live", type=int, choices=range(len(SLOTS) + 1), default=default.live)
    parser.add_argument("--blueprint", choices=BLUEPRINT_NAMES[1:8], default=default.blueprint)
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--validation", choices=("auto", "fused", "separate"), default=default.validation)
    result = run_baseline(Workload(**vars(parser.parse_args())))
    print(
        f"{result['eps']} env-steps/s at N={result['N']} B={result['B']} T={result['T']} V={result['V']} "
        f"K={result['K']}, {result['images_per_second']} images/s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
