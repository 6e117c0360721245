"""The opponents of the engine as loops over some of the envs, in one process: all that is declared,
or hosts alone.

Every env draws its weights and batches from its own number, so that it comes to the same whichever
process it is in.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.baseline_loop import (
    Crops,
    Done,
    Images,
    LoopData,
    Workload,
    env_step,
    make_envs,
    shuffled_batches,
)
from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import compiled_graphs, wait_for
from benchmarks.timing import BenchmarkError
from esper_soa.nets.config import IMAGE_CHANNELS, TaskConfig
from esper_soa.nets.datasets import load_images
from esper_soa.nets.precision import choose_precision
from esper_soa.ops.device import keep_freed_memory, resolve_device
from esper_soa.ops.profile import PhaseProfile

# env-steps of one env per form of a loop, of which the quickest counts: one slow moment decides
# nothing
TRIALS = 8
SMALL_VALIDATION = 16  # images of a validation pass that suit a CPU's caches

Forms = dict[str, tuple[int | str, ...]]  # choices to be tried one after the other, by setting


class Played(NamedTuple):
    """What a loop did in some env-steps of its envs."""

    seconds: float
    phases: dict[str, float]
    done: Done  # images of the last env-step


def precision_of(cfg: EpsConfig, device: torch.device) -> torch.dtype:
    """The engine's number format; BenchmarkError for float16, which wants loss scales."""
    found = choose_precision(cfg.compute.precision, device).dtype
    if found == torch.float16:
        raise BenchmarkError(
            "compute.precision=float16: the loops have no loss scales; take float32 or bfloat16"
        )
    return found


class PlainLoop:
    """Ordinary modules, env after env, with seeds, augmentation, state machine; no policy."""

    columns = 3  # of timing.COLUMNS

    def __init__(self, cfg: EpsConfig, numbers: Sequence[int]) -> None:
        """The envs with these numbers."""
        self.device = resolve_device(cfg.device)
        keep_freed_memory(self.device)  # as in a run of the engine
        self.profile = PhaseProfile(self.device)
        self.data = loop_data(cfg, self.device)
        self.work = workload(cfg, self.device)
        self.envs = make_envs(self.work, numbers)
        self.done: list[Done] = []

    @staticmethod
    def forms(cfg: EpsConfig, device: torch.device) -> Forms:
        """How validation may be done."""
        found: Forms = (
            {"validation": ("separate", "fused")} if cfg.baseline_validation == "auto" else {}
        )
        return found | validation_sizes(cfg, device, cfg.batch_size)

    def choose(self, setting: str, value: int | str) -> None:
        """One of the forms."""
        setattr(self.work, setting, value)

    def trial(self) -> float:
        """Seconds of the first env's env-step, the quickest of a few."""
        return quickest(lambda: env_step(self.envs[:1], self.work, self.data), self.device)

    def one_step(self) -> None:
        """An env-step of every env."""
        self.done = env_step(self.envs, self.work, self.data, self.profile.phase_ended)

    def play(self, steps: int) -> Played:
        """Some env-steps of every env."""
        return play(self, steps)

    def facts(self) -> dict[str, object]:
        """How the work is done."""
        size = self.work.val_batch or self.work.batch
        dtype = str(self.work.precision).removeprefix("torch.")
        return {
            "fused_validation": self.work.fused,
            "val_batch": size,
            "dtype": dtype,
            "graphs": compiled_graphs(),
        }

    def results(self) -> list[np.ndarray]:
        """The weights of every env's host, then its accuracy."""
        return [np.append(env.host.flat().cpu().numpy(), env.accuracy) for env, _ in self.envs]


class BareLoop:
    """Hosts alone, as a user of torch would train them: no seeds, augmentation or policy."""

    columns = 2

    def __init__(self, cfg: EpsConfig, numbers: Sequence[int]) -> None:
        """The hosts with these numbers, trained on ready-made batches in a fixed order."""
        self.device = resolve_device(cfg.device)
        self.task = cfg.task
        keep_freed_memory(self.device)
        self.profile = PhaseProfile(self.device)
        self.precision = precision_of(cfg, self.device)
        images, labels, val = ready_images(cfg, self.device)
        parts = (
            images[: cfg.train_samples].split(cfg.batch_size),
            labels[: cfg.train_samples].split(cfg.batch_size),
        )
        self.batches = list(zip(*parts, strict=True))
        self.val = val
        self.val_batch = cfg.val_samples
        self.nets = []
        for number in numbers:
            torch.manual_seed(cfg.seed + number)
            self.nets.append(bare_host(cfg.task).to(self.device, memory_format=torch.channels_last))  # type: ignore[call-overload]
        self.optimisers = [
            torch.optim.SGD(
                net.parameters(),
                cfg.task.host_lr,
                cfg.task.momentum,
                weight_decay=cfg.task.weight_decay,
                fused=True,
            )
            for net in self.nets
        ]
        self.how = "eager"
        self.calls: tuple[LossOf, LogitsOf] = loss_of, logits_of
        self.done: list[Done] = []

    @staticmethod
    def forms(cfg: EpsConfig, device: torch.device) -> Forms:
        """Eager, or compiled too where there is a compiler; and the images of a validation pass."""
        compiler = device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
        both: tuple[str, ...] = ("eager", "compile") if compiler else ("eager",)
        found: Forms = {"how": both if cfg.bare_how == "auto" else (cfg.bare_how,)}
        return found | validation_sizes(cfg, device, cfg.val_samples)

    def choose(self, setting: str, value: int | str) -> None:
        """One of the forms."""
        if (setting, value) == ("how", "compile"):
            self.calls = torch.compile(loss_of), torch.compile(logits_of)
        elif setting == "how":
            self.calls = loss_of, logits_of
        setattr(self, setting, value)

    def trial(self) -> float:
        """Seconds of the first host's training and validation, the quickest of a few."""
        return quickest(lambda: self._one(0), self.device)

    def one_step(self) -> None:
        """Training and validation of every host."""
        self.done = [self._one(place) for place in range(len(self.nets))]
        wait_for(self.device)

    def play(self, steps: int) -> Played:
        """Training and validation of every host a few times."""
        return play(self, steps)

    def facts(self) -> dict[str, object]:
        """How the work is done."""
        dtype = str(self.precision).removeprefix("torch.")
        return {
            "how": self.how,
            "val_batch": self.val_batch,
            "dtype": dtype,
            "graphs": compiled_graphs(),
        }

    def results(self) -> list[np.ndarray]:
        """The weights of every host."""
        flat = [
            torch.cat([weight.detach().flatten() for weight in net.parameters()])
            for net in self.nets
        ]
        return [vector.cpu().numpy() for vector in flat]

    def _one(self, place: int) -> Done:
        """Train and validate one host."""
        net = self.nets[place]
        optimiser = self.optimisers[place]
        loss, logits = self.calls
        cast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16
        )
        net.train()
        for images, labels in self.batches:
            optimiser.zero_grad(set_to_none=True)
            with cast:
                found = loss(net, images, labels)
            found.backward()
            if self.task.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(net.parameters(), self.task.max_grad_norm)
            optimiser.step()
        self.profile.phase_ended("training")
        net.eval()
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        tested = 0
        with torch.inference_mode(), cast:
            for images, labels in zip(
                *(part.split(self.val_batch) for part in self.val), strict=True
            ):
                hits += (logits(net, images).argmax(1) == labels).sum()
                tested += len(labels)
        self.profile.phase_ended("validation")
        return Done(sum(len(labels) for _, labels in self.batches), tested)


Loop = PlainLoop | BareLoop
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
LogitsOf = Callable[[nn.Module, Tensor], Tensor]


def loss_of(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(net(images), labels)


def logits_of(net: nn.Module, images: Tensor) -> Tensor:
    """Logits [n, classes]."""
    return net(images)


def bare_host(task: TaskConfig) -> nn.Sequential:
    """The host of `task` in torch's own modules."""
    layers: list[nn.Module] = []
    width = IMAGE_CHANNELS
    for block in range(task.num_blocks):
        wider = task.channels(block)
        size = task.kernel_size
        layers += [
            nn.Conv2d(width, wider, size, padding=size // 2, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(True),
        ]
        layers += [nn.MaxPool2d(2)] * (block < task.num_pools)
        width = wider
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, task.num_classes)
    )


def play(loop: Loop, steps: int) -> Played:
    """Some env-steps of the loop's envs, timed as a whole and by phase."""
    wait_for(loop.device)
    loop.profile.take()
    begun = time.perf_counter()
    for _ in range(steps):
        loop.one_step()
    wait_for(loop.device)
    seconds = time.perf_counter() - begun
    return Played(
        seconds, loop.profile.take(), Done(*(sum(parts) for parts in zip(*loop.done, strict=True)))
    )


def tune(
    forms: Forms, choose: Callable[[str, int | str], object], trial: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of every form that was tried; the quickest of each setting stays chosen."""
    tried: dict[str, float] = {}
    for setting, values in forms.items():
        best = values[0]
        least = math.inf
        for value in values:
            choose(setting, value)
            seconds = trial() if len(values) > 1 else 0.0
            if len(values) > 1:
                tried[f"{setting} {value}"] = 1e3 * seconds
            if seconds < least:
                best = value
                least = seconds
        choose(setting, best)
    return tried


def quickest(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest call of a few, after one that may pay for compilation."""
    times = []
    for _ in range(1 + TRIALS):
        wait_for(device)
        begun = time.perf_counter()
        action()
        wait_for(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def validation_sizes(cfg: EpsConfig, device: torch.device, whole: int) -> Forms:
    """Images of a validation pass to be tried."""
    small = device.type == "cpu" and cfg.val_samples > SMALL_VALIDATION
    return {"val_batch": (whole, SMALL_VALIDATION)} if small else {"val_batch": (whole,)}


def workload(cfg: EpsConfig, device: torch.device) -> Workload:
    """The declared work as the plain loop takes it."""
    return Workload(
        envs=cfg.envs,
        batch=cfg.batch_size,
        train=cfg.train_samples,
        val=cfg.val_samples,
        live=cfg.live,
        live_envs=cfg.live_envs,
        blueprint=cfg.blueprint,
        stage=cfg.stage,
        slots=tuple(cfg.slots),
        task=cfg.task,
        device=str(device),
        validation=cfg.baseline_validation,
        seed=cfg.seed,
        precision=precision_of(cfg, device),
    )


def loop_data(cfg: EpsConfig, device: torch.device) -> LoopData:
    """The images of the engine's run as normalised floats in channels_last."""
    train, labels, val = ready_images(cfg, device)
    count = cfg.train_samples // cfg.batch_size
    if cfg.augment:
        crops = Crops(train, labels)
        return LoopData(lambda batch, random: crops.batches(batch, count, random), val)
    return LoopData(
        lambda batch, random: shuffled_batches(train, labels, batch, random)[:count], val
    )


def ready_images(cfg: EpsConfig, device: torch.device) -> tuple[Tensor, Tensor, Images]:
    """Training images, their labels, and the validation images of an env-step with theirs."""
    found = load_images(train_config(cfg).data, device)
    train, val = (
        ready_made(images, found.mean, found.std)
        for images in (found.train_images, found.test_images)
    )
    return train, found.train_labels, (val, found.test_labels)


def ready_made(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalised float32 [n, 3, 32, 32] in channels_last from uint8 [n, 32, 32, 3]."""
    centre, spread = (torch.tensor(values, device=images.device) for values in (mean, std))
    return ((images / 255 - centre) / spread).permute(0, 3, 1, 2)
