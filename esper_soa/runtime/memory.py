"""Whether a run fits into the memory of its device, asked before anything is built.

`check_room` adds up what is known to be needed: a lower bound, so what it refuses could not have
run; what a run takes indeed is measured by probe.py. `memory_errors` turns an allocation that fails
all the same into one line.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch

from esper_soa.config.nets import IMAGES, LOSS_SETTINGS, SIZE_SETTINGS
from esper_soa.config.ranges import env_words
from esper_soa.config.settings import LOWER, TrainConfig
from esper_soa.env.observation import NUM_ENV_FEATURES, feature_names
from esper_soa.env.step import EnvRules
from esper_soa.nets.data.datasets import SampleCount, sample_spec
from esper_soa.nets.data.orders import MAX_STORED
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.parts import DRAWN_AT_ONCE
from esper_soa.nets.model.user_parts import task_shape
from esper_soa.nets.seeds.pools import row_layout
from esper_soa.nets.sgd import state_width
from esper_soa.runtime.device import choose_layout, sizes_of
from esper_soa.system.errors import SettingError

FLOAT = 4  # bytes of a number
MIB = 2**20
GIB = 2**30
DRAW_BYTES = 16  # bytes of a random number while it is drawn: its place and its hash, both int64
# When needs arise that pass.
BUILT = "building"
PASSED = "a pass of training"
UPDATED = "a step"
LEARNED = "the policy's update"
NO_SAMPLES = SampleCount(0, 0)
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
ALLOCATION_FAILED = ("allocate memory", "not enough memory", "out of memory")  # torch's words


class Need(NamedTuple):
    """Memory for one thing, and the settings that make it small."""

    what: str
    size: int  # bytes
    settings: tuple[str, ...]
    during: str = ""  # when it is needed, if not always


def at_once(parts: Sequence[Need]) -> int:
    """Bytes that are needed at the same time: all that lasts, and the most of what passes."""
    times = dict.fromkeys([need.during for need in parts], 0)
    for need in parts:
        times[need.during] += need.size
    lasting_bytes = times.pop("", 0)
    return lasting_bytes + max(times.values(), default=0)


def needs(cfg: TrainConfig, device: torch.device, samples: SampleCount = NO_SAMPLES) -> list[Need]:
    """What a run needs, each part at least; `samples` are those that are still to be read."""
    shape = task_shape(cfg.task, cfg.slots)
    spec = sample_spec(cfg.data)
    slots = shape.slots
    narrower = SIZE_SETTINGS.get(cfg.task.host, ())
    rows = sum(sum(row_layout(shape, slot)) for slot in range(len(slots)))
    numbers = shape.parameters.total + rows
    # parameters, what the optimizer keeps, snapshot
    weights = 2 * numbers + state_width(cfg.task.optimizer, numbers) + 2 * shape.statistics.total
    data = cfg.data
    most = max(data.synthetic_train, data.synthetic_test, data.validation_images)
    drawn_images = any(one.name == "synthetic" for one in data.sets)
    image_bytes = DRAW_BYTES * spec.elements * most * drawn_images
    settings_to_lower = ("data.synthetic_train", "data.synthetic_test")
    drawn = DRAW_BYTES * min(cfg.envs * shape.parameters.total, DRAWN_AT_ONCE)
    hosts = drawn + FLOAT * cfg.envs * shape.parameters.total
    # numbers in the order of a pass, with several data sets over the part of each env
    orders = 0 if data.split else cfg.envs // len(env_words(data.name)) * samples.train
    order = 8 * cfg.envs * cfg.train_samples + FLOAT * orders * (orders <= MAX_STORED)
    stored = spec.train_bytes * samples.train + spec.test_bytes * samples.others
    boosts = FLOAT * cfg.envs * (len(slots) * (len(slots) - 1) // 2 * cfg.steps)
    return [
        Need("weights", cfg.envs * FLOAT * weights, ("envs", *narrower)),
        *training_needs(cfg, shape, device, narrower=narrower),
        Need("drawing the weights of the hosts", hosts, ("envs", *narrower), during=BUILT),
        Need(f"the order of the {spec.name}", order, ("train_samples", "envs")),
        Need(f"drawing the synthetic {spec.name}", image_bytes, settings_to_lower, during=BUILT),
        Need(f"the {spec.name}", stored, ("data.root",)),
        Need("the boosts of seeds that help each other", boosts, ("steps", "envs", "slots")),
        *policy_needs(cfg, tuple(slot.name for slot in slots)),
    ]


def training_needs(
    cfg: TrainConfig, shape: HostShape, device: torch.device, narrower: tuple[str, ...]
) -> list[Need]:
    """What networks that train side by side take: copies of their rows, activations, losses; then
    gradients and what a step makes of them. Native kernels take network by network, in place.
    """
    layout = choose_layout(cfg, shape, device)
    elements = sample_spec(cfg.data).elements + sum(one.activations for one in shape.segments)
    torch_alone = cfg.compute.engine == "torch" or shape.modules is not None
    in_place = shape.slots[0].topology == IMAGES and not torch_alone
    num_nets = min(layout.workers * (1 if in_place else layout.env_chunk), cfg.envs)
    if device.type != "cpu":
        in_place = True
        num_nets = min(layout.env_chunk, cfg.envs)
    activations = FLOAT * num_nets * cfg.batch_size * elements
    smaller = ("batch_size", "compute.env_chunk", *narrower[:1])
    found = [Need("activations of the batches in training", activations, smaller, during=PASSED)]
    each = min(layout.env_chunk, cfg.envs)
    losses = min(layout.workers, cfg.envs) * shape.head.loss_bytes(each, cfg.batch_size)
    found.append(Need("losses", losses, LOSS_SETTINGS.get(cfg.task.host, smaller), during=PASSED))
    if not in_place:
        row = FLOAT * num_nets * shape.parameters.total
        copies = row + FLOAT * num_nets * state_width(cfg.task.optimizer, shape.parameters.total)
        settings = ("compute.workers", "compute.env_chunk", *narrower)
        found += [
            Need("networks in training", copies, settings, during=at) for at in (PASSED, UPDATED)
        ]
        found.append(Need("gradients of the hosts", 3 * row, settings, during=UPDATED))
    return found


def policy_needs(cfg: TrainConfig, slots: tuple[str, ...]) -> list[Need]:
    """Rollout and weights of the learning policy; nothing for a scripted one."""
    if cfg.policy.name != "ppo":
        return []
    network = cfg.policy.network
    features = len(feature_names(slots, cfg.policy.observe))
    width = network.slot_features
    half = network.hidden // 2
    inputs = NUM_ENV_FEATURES + len(cfg.policy.observe) + 2 * width
    weights = network.features * inputs + 8 * network.layers * network.hidden**2
    envs = -(-cfg.envs // min(cfg.policy.ppo.minibatches, cfg.envs))
    # Numbers that a row keeps for its gradient: input layer, norm, ReLU; gates, states and norms of
    # the LSTM; heads.
    elements = 3 * network.features + 20 * network.layers * network.hidden + 12 * network.hidden
    # layer, norm and encoding of every slot, and what scores it
    elements += len(slots) * (3 * width + half)
    sizes = ("hidden", "layers", "features", "slot_features")
    smaller = tuple(f"policy.network.{name}" for name in sizes)
    rollout = cfg.steps * cfg.envs * (FLOAT * features + 8 * (len(slots) + 12))
    update = FLOAT * cfg.steps * envs * elements
    return [
        Need("the rollout", rollout, ("steps", "envs")),
        Need("the policy", 4 * FLOAT * weights, smaller),  # parameters, gradients, two moments
        Need("activations of the update", update, ("steps", "envs", *smaller), during=LEARNED),
    ]


def free_memory(device: torch.device) -> int | None:
    """Bytes that the device, or the machine within its container, has left; None where unknown.

    On a GPU, the process' own cache counts as free.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    lines = _text(MEMINFO).splitlines()
    available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for names in CGROUP_LIMITS:
        limit, usage = [_text(CGROUPS / name).strip() for name in names]
        if limit.isdigit() and usage.isdigit():
            available.append(int(limit) - int(usage))
    return min(available) if available else None


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii") if path.exists() else ""


def check_room(
    cfg: TrainConfig, device: torch.device, samples: SampleCount = NO_SAMPLES, processes: int = 1
) -> None:
    """Raise SettingError, which names what needs most, where less memory is free than is needed.

    processes: how many, with as much work each, share what is free.
    """
    free = free_memory(device)
    free = None if free is None else free // processes
    parts = sorted(needs(cfg, device, samples), key=lambda need: -need.size)
    total = at_once(parts)
    if free is None or total <= free:
        return
    values = {setting: reduce(getattr, setting.split("."), cfg) for setting in parts[0].settings}
    settings = [setting for setting, value in values.items() if value != 1]
    first = settings[0]
    remedy = f"Take fewer {sample_spec(cfg.data).name} than in" if first == "data.root" else "Lower"
    most = most_envs(cfg, device, free, samples=samples)
    hint = f" At most {most} envs can fit." if 0 < most < cfg.envs else ""
    listed = ", ".join(f"{need.size / GIB:.1f} for {need.what}" for need in parts[:3])
    reason = f"It needs at least {total / GIB:.1f} GiB ({listed}), and {free / GIB:.1f} GiB"
    reason = f"{reason} are free. {remedy} {' or '.join(settings)}.{hint}"
    raise SettingError(first, values[first], f"so small that {device} holds the run", remedy=reason)


def most_envs(
    cfg: TrainConfig, device: torch.device, free: int, samples: SampleCount = NO_SAMPLES
) -> int:
    """The largest N, at most that of `cfg`, that `needs` no more than `free` bytes; 0 if none."""

    def excess(envs: int) -> int:
        return at_once(needs(replace(cfg, envs=envs), device, samples)) - free

    return bisect_right(range(1, cfg.envs + 1), 0, key=excess)


def room_for_steps(cfg: TrainConfig, device: torch.device, processes: int = 1) -> int | None:
    """Bytes that a run leaves to an engine that keeps what its passes work in, at most; None where
    nobody knows. processes: that share what is free.
    """
    free = free_memory(device)
    others = [need for need in needs(cfg, device) if need.during not in (PASSED, UPDATED)]
    return None if free is None else free // processes - at_once(others)


def plan_in_words(cfg: TrainConfig, device: torch.device, rules: EnvRules) -> str:
    """The memory that a run needs at least, what needs most of it, and what is free, for the log.

    An engine that keeps what its passes work in says itself how much that is.
    """
    kept_bytes = rules.engine.persistent_bytes(rules.nets, sizes_of(cfg), device)
    parts = needs(cfg, device)
    if kept_bytes:
        others = [need for need in parts if need.during not in (PASSED, UPDATED)]
        parts = [Need(f"the steps of {rules.engine.chosen.name}", kept_bytes, ()), *others]
    parts = sorted(parts, key=lambda need: -need.size)
    free = free_memory(device)
    rest = "what is free is not known" if free is None else f"{free / GIB:.1f} GiB are free"
    most = f"{parts[0].size / MIB:,.0f} MiB of it for {parts[0].what}"
    return f"at least {at_once(parts) / MIB:,.0f} MiB on {device} ({most}); {rest}"


@contextmanager
def memory_errors(fault: type[Exception]) -> Iterator[None]:
    """Raise `fault` with one line, in place of an allocation that fails within."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        words = str(error)
        if isinstance(error, RuntimeError) and not any(part in words for part in ALLOCATION_FAILED):
            raise
        raise fault(f"out of memory. Lower {LOWER}.") from error
