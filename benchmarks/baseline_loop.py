"""The same work as the stacked engine, one env after the other: the opponent in benchmarks.

`python -m benchmarks.baseline_loop --envs 8 --batch 32 --train 256 --val 256 --live 3` prints
env-steps per second with all that they depend on, and a JSON line last; benchmarks/eps.py times it
beside the engine. Images lie on the device, ready-made; warm-up is not counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from benchmarks.baseline_env import BaselineEnv, ScalarAction
from benchmarks.baseline_passes import read_together
from esper_soa.env.config import GatesConfig, LifecycleConfig
from esper_soa.nets.config import IMAGE_CHANNELS, IMAGE_SIZE, TaskConfig
from esper_soa.vocabulary import BLUEPRINT_NAMES, STAGE_NAMES, Op, Stage

LIVE_ALPHA = 0.5  # of the blended seeds of a benchmark
SLOTS = ("r0c0", "r0c1", "r0c2")
PADDING = 4  # pixels around an image that is to be cropped
PADDED = IMAGE_SIZE + 2 * PADDING

Images = tuple[Tensor, Tensor]  # images [n, 3, 32, 32] and labels [n]


@dataclass
class Workload:
    """What is timed; images are counted per env and env-step."""

    envs: int = 8
    batch: int = 32
    train: int = 256
    val: int = 256
    # Seeds per env; in BLENDING at alpha 0.5 or in HOLDING, 2^live subsets are evaluated.
    live: int = 0
    live_envs: int = -1  # envs that have them, the first ones; -1 = all
    blueprint: str = "conv_light"
    stage: str = "blending"
    slots: tuple[str, ...] = SLOTS
    task: TaskConfig = field(default_factory=TaskConfig)
    steps: int = 5  # timed rounds of one env-step per env
    warmup: int = 2
    # "fused": all subsets in one pass, best on a GPU; "separate": best in a CPU's caches.
    validation: str = "auto"
    val_batch: int = 0  # validation images per pass; 0 = batch
    device: str = "cpu"
    threads: int = 1
    # Every env draws weights and batches from it and its own number, whoever else is in the loop.
    seed: int = 0
    precision: torch.dtype = torch.float32  # of activations: float32 or bfloat16

    @property
    def fused(self) -> bool:
        """All subsets go through the host in one pass."""
        return self.validation == "fused" or (self.validation == "auto" and self.device != "cpu")


class LoopData(NamedTuple):
    """Images of a loop, resident on the device."""

    # Batches of one env-step, by their size, drawn at random.
    train: Callable[[int, Generator], list[Images]]
    val: Images


class Crops:
    """Training images to be cropped and mirrored at random, ready-made except for that."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images [D, 3, 32, 32], normalised; black is what the padding is."""
        black = images.amin(dim=(0, 2, 3)).view(1, -1, 1, 1)
        padded = F.pad(images - black, (PADDING,) * 4) + black
        both = torch.cat((padded, padded.flip(3))).permute(0, 2, 3, 1).contiguous()
        self.labels = labels
        width = IMAGE_SIZE * IMAGE_CHANNELS
        self.lines = both.view(-1).as_strided((both.numel() - width + 1, width), (1, 1))

    def cut(self, rows: Tensor, random: Generator) -> Images:
        """Crops [n, 3, 32, 32] in channels_last of the images so numbered, and their labels."""
        count = len(rows)
        device = rows.device
        top, left = torch.randint(2 * PADDING + 1, (2, count), device=device, generator=random)
        mirrored = torch.randint(2, (count,), device=device, generator=random)
        line = ((rows + mirrored * len(self.labels)) * PADDED + top)[:, None] + torch.arange(
            IMAGE_SIZE, device=device
        )
        starts = (line * PADDED + left[:, None]) * IMAGE_CHANNELS
        crops = self.lines.index_select(0, starts.flatten())
        shape = (count, IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS)
        return crops.view(shape).permute(0, 3, 1, 2), self.labels[rows]

    def batches(self, size: int, count: int, random: Generator) -> list[Images]:
        """`count` batches of images in random order, no image twice."""
        order = torch.randperm(len(self.labels), device=self.labels.device, generator=random)[
            : size * count
        ]
        return [self.cut(rows, random) for rows in order.split(size)]


class LoopEnv(NamedTuple):
    """An env of the loop, and what its batches are drawn from."""

    env: BaselineEnv
    random: Generator


class Done(NamedTuple):
    """Images that the envs of a loop have worked on in an env-step."""

    train: int
    val: int  # each counted once per subset


def untimed(phase: str) -> None:
    """The end of a phase that nobody times."""


def make_env(work: Workload, live: int) -> BaselineEnv:
    """An env with `live` seeds in the declared stage, whose alphas stand still."""
    env = BaselineEnv(
        work.task,
        list(work.slots),
        LifecycleConfig(),
        GatesConfig(),
        device=work.device,
        precision=work.precision,
    )
    stage = STAGE_NAMES.index(work.stage)
    alpha = {Stage.TRAINING: 0.0, Stage.BLENDING: LIVE_ALPHA}.get(stage, 1.0)
    for slot in range(live):
        env.apply(
            ScalarAction(
                slot=slot, blueprint=BLUEPRINT_NAMES.index(work.blueprint), op=Op.GERMINATE
            )
        )
        machine = env.machines[slot]
        machine.seed.stage = stage
        machine.seed.alpha = machine.ramp.alpha = machine.ramp.start = machine.ramp.target = alpha
    return env


def make_envs(work: Workload, numbers: Sequence[int] | None = None) -> list[LoopEnv]:
    """The envs with these numbers, all by default; the first `live_envs` of all have live seeds."""
    with_seeds = work.envs if work.live_envs < 0 else work.live_envs
    found = []
    for number in range(work.envs) if numbers is None else numbers:
        torch.manual_seed(work.seed + number)
        env = make_env(work, work.live if number < with_seeds else 0)
        found.append(LoopEnv(env, Generator(work.device).manual_seed(work.seed + number)))
    return found


def random_images(count: int, device: str) -> Images:
    """Images [count, 3, 32, 32] in channels_last, and labels [count]."""
    images = torch.randn(count, IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE, device=device)
    return images.to(memory_format=torch.channels_last), torch.randint(
        TaskConfig().num_classes, (count,), device=device
    )


def shuffled_batches(images: Tensor, labels: Tensor, batch: int, random: Generator) -> list[Images]:
    """A random order of the images, in whole batches."""
    order = torch.randperm(len(labels), device=labels.device, generator=random)
    return [(images[rows], labels[rows]) for rows in order.split(batch) if len(rows) == batch]


def env_step(
    envs: Sequence[LoopEnv],
    work: Workload,
    data: LoopData,
    phase_ended: Callable[[str], None] = untimed,
) -> list[Done]:
    """One env-step of every env, in which nothing is done to its slots; returns what each has
    worked on.

    The results of all are read together, so that the device is waited for once.
    """
    size = work.val_batch or work.batch
    validation = list(zip(data.val[0].split(size), data.val[1].split(size), strict=True))
    trained = []
    tested = []
    for env, random in envs:
        batches = data.train(work.batch, random)
        phase_ended("data")
        trained.append(env.training_pass(batches))
        phase_ended("training")
        tested.append(
            env.fused_validation_pass(validation) if work.fused else env.validation_pass(validation)
        )
        phase_ended("validation")
    numbers = read_together([*trained, *tested])
    for place, (env, _) in enumerate(envs):
        reading = trained[place].read(numbers[place])
        env.record(reading, tested[place].read(numbers[len(envs) + place]))
        env.apply(ScalarAction())
        env.tick()
    phase_ended("state")
    return [
        Done(one.num_images, other.num_images * len(other.codes))
        for one, other in zip(trained, tested, strict=True)
    ]


def round_seconds(envs: Sequence[LoopEnv], work: Workload, data: LoopData) -> float:
    """Seconds for one env-step of every env."""
    started = time.perf_counter()
    env_step(envs, work, data)
    return time.perf_counter() - started


def run_baseline(work: Workload) -> dict[str, object]:
    """Env-steps per second (median round) beside everything they depend on."""
    torch.manual_seed(work.seed)
    torch.set_num_threads(work.threads)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True
    envs = make_envs(work)
    train = random_images(work.train, work.device)
    val = random_images(work.val, work.device)
    data = LoopData(lambda batch, random: shuffled_batches(*train, batch, random), val)
    for _ in range(work.warmup):
        round_seconds(envs, work, data)
    seconds = [round_seconds(envs, work, data) for _ in range(work.steps)]
    eps = work.envs / statistics.median(seconds)
    return {
        "name": "baseline_loop",
        "eps": round(eps, 3),
        "images_per_second": round(
            eps * (work.train // work.batch * work.batch + work.val * 2**work.live), 1
        ),
        "N": work.envs,
        "B": work.batch,
        "T": work.train // work.batch * work.batch,
        "V": work.val,
        "K": 2**work.live,
        "live": work.live,
        "blueprint": work.blueprint,
        "fused": work.fused,
        "device": work.device,
        "threads": work.threads,
        "torch": torch.__version__,
        "seconds": [round(each, 4) for each in seconds],
    }


def main() -> None:
    """Command line: the fields of Workload that differ most are options."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Workload()
    for name in ("envs", "batch", "train", "val", "steps", "warmup", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, default=vars(default)[name])
    parser.add_argument("--live", type=int, choices=range(len(SLOTS) + 1), default=default.live)
    parser.add_argument("--blueprint", choices=BLUEPRINT_NAMES[1:8], default=default.blueprint)
    parser.add_argument("--device", default=default.device)
    parser.add_argument(
        "--validation", choices=("auto", "fused", "separate"), default=default.validation
    )
    result = run_baseline(Workload(**vars(parser.parse_args())))
    print(
        f"{result['eps']} env-steps/s at N={result['N']} B={result['B']} T={result['T']} "
        f"V={result['V']} K={result['K']}, {result['images_per_second']} images/s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
