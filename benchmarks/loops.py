"""The opponents of the engine as loops over some of the envs, in one process: all that is declared,
or hosts alone.

Every env draws its weights and batches from its own number, so that it comes to the same whichever
process it is in.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.baseline_env import BaselineEnv, Batches, ScalarAction
from benchmarks.baseline_passes import read_together
from benchmarks.eps_config import EpsConfig, train_config
from benchmarks.machine import MIB, count_syncs, forget_peak, peak, wait_for
from benchmarks.timing import LIVE_ALPHA
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE, TaskConfig
from esper_soa.nets.data.datasets import load_images
from esper_soa.nets.data.text import load_text
from esper_soa.nets.model.user_parts import task_host
from esper_soa.nets.model.user_segment import UserHost
from esper_soa.nets.precision import choose_precision
from esper_soa.runtime.device import keep_freed_memory, resolve_device
from esper_soa.training.results.profile import PhaseProfile
from esper_soa.vocabulary import BLUEPRINT_NAMES, Op, Stage

# env-steps of one env per form of a loop, of which the quickest counts: one slow moment decides
# nothing
TRIALS = 8
STREAMS = 8  # of a GPU, for envs side by side
SMALL_VALIDATION = 16  # images of a validation pass that suit a CPU's caches
PADDING = 4  # pixels around an image that is to be cropped
PADDED = IMAGE_SIZE + 2 * PADDING

Forms = dict[str, tuple[int | str, ...]]  # choices to be tried one after the other, by setting
Images = tuple[Tensor, Tensor]  # images [n, 3, 32, 32] and labels [n]
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
LogitsOf = Callable[[nn.Module, Tensor], Tensor]


class Done(NamedTuple):
    """Images that have been worked on in an env-step."""

    train: int
    val: int  # each counted once per subset


class Played(NamedTuple):
    """What a loop did in some env-steps of its envs."""

    seconds: float
    phases: dict[str, float]
    done: Done  # images of the last env-step


class Loop:
    """Some of the envs, one after the other."""

    columns: int  # of timing.COLUMNS
    val_batch: int  # images of a validation pass

    def __init__(self, cfg: EpsConfig) -> None:
        self.cfg = cfg
        self.device = resolve_device(cfg.device)
        self.before = forget_peak(self.device)
        keep_freed_memory(self.device)  # as in a run of the engine
        self.profile = PhaseProfile(self.device)
        self.precision = choose_precision(cfg.compute.precision, self.device).dtype

    def forms(self) -> Forms:
        """Ways to do the same work; here the images of a validation pass."""
        small = self.device.type == "cpu" and self.cfg.val_samples > SMALL_VALIDATION
        return {"val_batch": (self.val_batch, SMALL_VALIDATION) if small else (self.val_batch,)}

    def choose(self, setting: str, value: int | str) -> None:
        """One of the forms."""
        setattr(self, setting, value)

    def one_step(self, envs: int | None = None) -> list[Done]:
        """An env-step of every env, or of the first `envs`."""
        raise NotImplementedError

    def trial(self) -> float:
        """Seconds of the first env's env-step, the quickest of a few after one to warm up; on a GPU
        of as many as may run side by side.
        """
        envs = STREAMS if self.device.type == "cuda" else 1
        times = []
        for _ in range(1 + TRIALS):
            wait_for(self.device)
            begun = time.perf_counter()
            self.one_step(envs)
            wait_for(self.device)
            times.append(time.perf_counter() - begun)
        return min(times[1:])

    def play(self, steps: int) -> Played:
        """Some env-steps of every env, timed as a whole and by phase."""
        wait_for(self.device)
        self.profile.take()
        begun = time.perf_counter()
        for _ in range(steps):
            done = self.one_step()
        wait_for(self.device)
        seconds = time.perf_counter() - begun
        images = Done(*(sum(parts) for parts in zip(*done, strict=True)))
        return Played(seconds, self.profile.take(), images)

    def facts(self) -> dict[str, object]:
        """How the work is done."""
        return {
            "val_batch": self.val_batch,
            "dtype": str(self.precision).removeprefix("torch."),
        }

    def syncs(self) -> int:
        """Waits for the device in an env-step."""
        return count_syncs(self.one_step, self.device)

    def peak_mib(self) -> float:
        """Most memory during an env-step, above what there was before the loop was built."""
        forget_peak(self.device)
        self.one_step()
        return (peak(self.device) - self.before) / MIB

    def processor_seconds(self) -> float:
        """Processor time of this process so far."""
        return time.process_time()


class LoopEnv(NamedTuple):
    """An env of the plain loop, and what its batches are drawn from."""

    env: BaselineEnv
    random: Generator


class PlainLoop(Loop):
    """Ordinary modules, env after env, with seeds, augmentation, state machine; no policy."""

    columns = 3

    def __init__(self, cfg: EpsConfig, numbers: Sequence[int]) -> None:
        """The envs with these numbers."""
        super().__init__(cfg)
        self.source = source_of(cfg, self.device)
        self.validation = "separate"
        self.streams = 1
        self.beside: list[torch.cuda.Stream] = []
        self.val_batch = cfg.batch_size
        self.envs = []
        for number in numbers:
            torch.manual_seed(cfg.seed + number)
            env = make_env(cfg, self.device, self.precision)
            random = Generator(self.device).manual_seed(cfg.seed + number)
            self.envs.append(LoopEnv(env, random))

    def forms(self) -> Forms:
        """All subsets in one pass, best on a GPU, or each in its own, best in a CPU's caches; on a
        GPU one env after the other, or side by side on streams.
        """
        streams: Forms = {"streams": (1, STREAMS)} if self.device.type == "cuda" else {}
        return {"validation": ("separate", "fused")} | streams | super().forms()

    def choose(self, setting: str, value: int | str) -> None:
        """One of the forms."""
        super().choose(setting, value)
        many = self.streams if self.streams > 1 else 0
        self.beside = [torch.cuda.Stream(self.device) for _ in range(many)]

    @contextmanager
    def on_stream(self, place: int) -> Iterator[None]:
        """Within it, work of an env waits for all before and for no other env, if on streams."""
        if not self.beside:
            yield
            return
        stream = self.beside[place % len(self.beside)]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def one_step(self, envs: int | None = None) -> list[Done]:
        """An env-step in which nothing is done to slots; the device is waited for once."""
        val = self.source.validation(self.val_batch)
        count = self.cfg.train_samples // self.cfg.batch_size
        chosen = self.envs[:envs]
        trained = []
        tested = []
        for place, (env, random) in enumerate(chosen):
            with self.on_stream(place):
                batches = self.source.batches(self.cfg.batch_size, count, random)
                self.profile.on_phase_end("data")
                trained.append(env.training_pass(batches))
                self.profile.on_phase_end("training")
                fused = self.validation == "fused"
                validate = env.fused_validation_pass if fused else env.validation_pass
                tested.append(validate(val))
                self.profile.on_phase_end("validation")
        for stream in self.beside:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        numbers = read_together([*trained, *tested])
        for place, (env, _) in enumerate(chosen):
            reading = trained[place].read(numbers[place])
            env.record(reading, tested[place].read(numbers[len(chosen) + place]))
            env.apply(ScalarAction())
            env.tick()
        self.profile.on_phase_end("state")
        return [
            Done(training.num_images, validation.num_images * len(validation.codes))
            for training, validation in zip(trained, tested, strict=True)
        ]

    def facts(self) -> dict[str, object]:
        """How the work is done."""
        fused = self.validation == "fused"
        return super().facts() | {"fused_validation": fused, "streams": self.streams}


class BareLoop(Loop):
    """Hosts alone, as a user of torch would train them: no seeds, augmentation or policy."""

    columns = 2

    def __init__(self, cfg: EpsConfig, numbers: Sequence[int]) -> None:
        """The hosts with these numbers, trained on ready-made batches in a fixed order."""
        super().__init__(cfg)
        images, labels, self.val = ready_images(cfg, self.device)
        few = images[: cfg.train_samples], labels[: cfg.train_samples]
        self.batches = batches_of(few, cfg.batch_size)
        self.val_batch = cfg.val_samples
        self.nets = []
        for number in numbers:
            torch.manual_seed(cfg.seed + number)
            self.nets.append(bare_host(cfg.task).to(self.device, memory_format=torch.channels_last))  # type: ignore[call-overload]
        rates: dict = {"lr": cfg.task.number("host_lr"), "momentum": cfg.task.number("momentum")}
        decay = cfg.task.number("weight_decay")
        self.optimisers = [
            torch.optim.SGD(net.parameters(), **rates, weight_decay=decay, fused=True)
            for net in self.nets
        ]
        self.how = "eager"
        self.calls: tuple[LossOf, LogitsOf] = loss_of, logits_of

    def forms(self) -> Forms:
        """Eager, and compiled where there is a compiler."""
        compiler = self.device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
        return {"how": ("eager", "compile") if compiler else ("eager",)} | super().forms()

    def choose(self, setting: str, value: int | str) -> None:
        """One of the forms."""
        super().choose(setting, value)
        if setting == "how":
            compiled = value == "compile"
            self.calls = loss_of, logits_of
            if compiled:
                self.calls = torch.compile(loss_of), torch.compile(logits_of)

    def one_step(self, envs: int | None = None) -> list[Done]:
        """Training and validation of every host."""
        pairs = zip(self.nets, self.optimisers, strict=True)
        done = [self._work(net, optimiser) for net, optimiser in list(pairs)[:envs]]
        wait_for(self.device)
        return done

    def facts(self) -> dict[str, object]:
        """How the work is done."""
        return super().facts() | {"how": self.how}

    def _work(self, net: nn.Module, optimiser: torch.optim.Optimizer) -> Done:
        """Train and validate one host."""
        loss, logits = self.calls
        short = self.precision == torch.bfloat16
        cast = torch.autocast(self.device.type, torch.bfloat16, enabled=short)
        net.train()
        for images, labels in self.batches:
            optimiser.zero_grad(set_to_none=True)
            with cast:
                found = loss(net, images, labels)
            found.backward()
            if self.cfg.task.number("max_grad_norm") > 0:
                nn.utils.clip_grad_norm_(net.parameters(), self.cfg.task.number("max_grad_norm"))
            optimiser.step()
        self.profile.on_phase_end("training")
        net.eval()
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        tested = batches_of(self.val, self.val_batch)
        with torch.inference_mode(), cast:
            for images, labels in tested:
                hits += (logits(net, images).argmax(1) == labels).sum()
        self.profile.on_phase_end("validation")
        return Done(*(sum(len(labels) for _, labels in part) for part in (self.batches, tested)))


def loss_of(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(net(images), labels)


def logits_of(net: nn.Module, images: Tensor) -> Tensor:
    """Logits [n, classes]."""
    return net(images)


def bare_host(task: TaskConfig) -> nn.Sequential:
    """The host of `task` in torch's own modules."""
    host = task_host(task)
    if isinstance(host, UserHost):
        return cast(nn.Sequential, host.make(host.classes))
    layers: list[nn.Module] = []
    width = IMAGE_CHANNELS
    for block in range(task.num_blocks):
        wider = task.channels(block)
        size = task.kernel_size
        layers.append(nn.Conv2d(width, wider, size, padding=size // 2, bias=False))
        layers += [nn.BatchNorm2d(wider), nn.ReLU(True)]
        layers += [nn.MaxPool2d(2)] * (block < task.num_pools)
        width = wider
    head = nn.Linear(width, task.classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def make_env(cfg: EpsConfig, device: torch.device, precision: torch.dtype) -> BaselineEnv:
    """An env with the declared seeds, whose alphas stand still."""
    env = BaselineEnv(
        cfg.task,
        cfg.slots,
        LifecycleConfig(),
        GatesConfig(),
        device=str(device),
        precision=precision,
    )
    blueprint = BLUEPRINT_NAMES.index(cfg.blueprint)
    for slot in range(cfg.live):
        env.apply(ScalarAction(slot=slot, blueprint=blueprint, op=Op.GERMINATE))
        seed = env.machines[slot].seed
        ramp = env.machines[slot].ramp
        seed.stage = Stage.BLENDING
        seed.alpha = ramp.alpha = ramp.start = ramp.target = LIVE_ALPHA
    return env


class Crops:
    """Training images to be cropped and mirrored at random, ready-made except for that, and those
    to validate with.
    """

    def __init__(self, images: Tensor, labels: Tensor, val: Images) -> None:
        """images [D, 3, 32, 32], normalised; black is what the padding is."""
        self.val = val
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
        first = (rows + mirrored * len(self.labels)) * PADDED + top
        line = first[:, None] + torch.arange(IMAGE_SIZE, device=device)
        starts = (line * PADDED + left[:, None]) * IMAGE_CHANNELS
        crops = self.lines.index_select(0, starts.flatten())
        shape = (count, IMAGE_SIZE, IMAGE_SIZE, IMAGE_CHANNELS)
        return crops.view(shape).permute(0, 3, 1, 2), self.labels[rows]

    def batches(self, size: int, count: int, random: Generator) -> list[Images]:
        """`count` batches of images in random order, no image twice."""
        order = torch.randperm(len(self.labels), device=self.labels.device, generator=random)
        return [self.cut(rows, random) for rows in order[: size * count].split(size)]

    def validation(self, size: int) -> Batches:
        """All images to validate with."""
        return batches_of(self.val, size)


class Windows:
    """Sequences of a text: those to train on begin anywhere."""

    def __init__(self, train: Tensor, val: Tensor, context: int) -> None:
        """Texts as tokens [M]."""
        self.train = train
        self.span = torch.arange(context + 1, device=train.device)
        self.val = val[: len(val) // context * context + 1].unfold(0, context + 1, context)

    def batches(self, size: int, count: int, random: Generator) -> list[Images]:
        """`count` batches of sequences that begin anywhere."""
        most = len(self.train) - len(self.span) + 1
        shape = count, size, 1
        first = torch.randint(most, shape, device=self.train.device, generator=random)
        return [self._pair(part) for part in self.train[first + self.span]]

    def validation(self, size: int) -> Batches:
        """All sequences to validate with."""
        return [self._pair(part) for part in self.val.split(size)]

    def _pair(self, windows: Tensor) -> Images:
        """Tokens [B, T] and the next ones [B*T]."""
        windows = windows.long()
        return windows[:, :-1], windows[:, 1:].flatten()


def source_of(cfg: EpsConfig, device: torch.device) -> Crops | Windows:
    """What the envs draw from: images or text of the engine's run."""
    if cfg.targets == 1:
        return Crops(*ready_images(cfg, device))
    context = cfg.task.transformer.context
    text = load_text(train_config(cfg).data).to(device)
    stretches = {part: text.tokens[slice(*text.bounds[part])] for part in ("train", "validation")}
    val = stretches["validation"][: cfg.val_samples * context + 1]
    return Windows(stretches["train"], val, context)


def tune(
    forms: Forms, choose: Callable[[str, int | str], object], trial: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of every form that was tried; the quickest of each setting stays chosen."""
    tried: dict[str, float] = {}
    for setting, values in forms.items():
        best = values[0]
        least = math.inf
        for value in values if len(values) > 1 else ():
            choose(setting, value)
            seconds = trial()
            tried[f"{setting} {value}"] = 1e3 * seconds
            if seconds < least:
                best = value
                least = seconds
        choose(setting, best)
    return tried


def ready_images(cfg: EpsConfig, device: torch.device) -> tuple[Tensor, Tensor, Images]:
    """Of the engine's run, normalised: to train with, their labels, to validate with."""
    found = load_images(train_config(cfg).data, device)
    centre, spread = (torch.tensor(part, device=device) for part in (found.mean, found.std))
    train, val = (
        ((images / 255 - centre) / spread).permute(0, 3, 1, 2)
        for images in (found.train_images, found.val_images)
    )
    return train, found.train_labels, (val, found.val_labels)


def batches_of(images: Images, size: int) -> Batches:
    """`images` one batch after the other."""
    return list(zip(*(part.split(size) for part in images), strict=True))
