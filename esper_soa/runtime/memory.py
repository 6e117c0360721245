"""Whether a run fits into the memory of its device, asked of its setup before anything is built.

`check_room` adds up what is known to be needed: a lower bound, so what it refuses could not have
run. `memory_errors` turns an allocation that fails all the same into one line.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import torch

from esper_soa.config.agent import PolicyConfig
from esper_soa.config.settings import LOWER
from esper_soa.nets.engine import Engine
from esper_soa.nets.needs import (
    FLOAT,
    GIB,
    MIB,
    PASSED,
    UPDATED,
    Need,
    at_once,
    least_training_needs,
    network_needs,
)
from esper_soa.nets.setup import Setup, lay_out
from esper_soa.system.errors import SettingError

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
LEARNED = "the policy's update"  # when a need arises that passes
ALLOCATION_FAILED = ("allocate memory", "not enough memory", "out of memory")  # torch's words


def needs(setup: Setup, policy: PolicyConfig, engine: Engine | None = None) -> list[Need]:
    """All that a run needs, each part at least; without an engine, of the one that takes least."""
    num_slots = len(setup.shape.slots)
    pairs = num_slots * (num_slots - 1) // 2
    boosts = FLOAT * setup.num_envs * pairs * setup.steps
    return [
        *network_needs(setup),
        *(least_training_needs(setup) if engine is None else engine.needs(setup)),
        Need("the boosts of seeds that help each other", boosts, ("steps", "envs", "slots")),
        *learner_needs(setup, policy),
    ]


def learner_needs(setup: Setup, policy: PolicyConfig) -> list[Need]:
    """Needs of the rollout, the weights and the update; none of a scripted policy."""
    if policy.name != "ppo":
        return []
    network = policy.network
    num_slots = len(setup.shape.slots)
    features = setup.env_features + num_slots * setup.slot_features
    width = network.slot_features
    half = network.hidden // 2
    inputs = setup.env_features + 2 * width
    weights = network.features * inputs + 8 * network.layers * network.hidden**2
    envs = -(-setup.num_envs // min(policy.ppo.minibatches, setup.num_envs))
    # Numbers that a row keeps for its gradient: input layer, norm, ReLU; gates, states and norms of
    # the LSTM; heads.
    elements = 3 * network.features + 20 * network.layers * network.hidden + 12 * network.hidden
    # layer, norm and encoding of every slot, and what scores it
    elements += num_slots * (3 * width + half)
    sizes = ("hidden", "layers", "features", "slot_features")
    smaller = tuple(f"policy.network.{name}" for name in sizes)
    rollout = setup.steps * setup.num_envs * (FLOAT * features + 8 * (num_slots + 12))
    update = FLOAT * setup.steps * envs * elements
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


def check_room(setup: Setup, policy: PolicyConfig) -> None:
    """Raise SettingError, which names what needs most, where less memory is free than is needed."""
    free = free_share(setup)
    parts = sorted(needs(setup, policy), key=lambda need: -need.size)
    total = at_once(parts)
    if free is None or total <= free:
        return
    values = {name: value_of(name, setup, policy) for name in parts[0].settings}
    settings = [name for name, value in values.items() if value != 1]
    first = settings[0]
    remedy = f"Take fewer {setup.spec.name} than in" if first == "data.root" else "Lower"
    most = most_envs(setup, policy, free)
    hint = f" At most {most} envs can fit." if 0 < most < setup.num_envs else ""
    listed = ", ".join(f"{need.size / GIB:.1f} for {need.what}" for need in parts[:3])
    reason = f"It needs at least {total / GIB:.1f} GiB ({listed}), and {free / GIB:.1f} GiB"
    reason = f"{reason} are free. {remedy} {' or '.join(settings)}.{hint}"
    fitting = f"so small that {setup.device} holds the run"
    raise SettingError(first, values[first], fitting, remedy=reason)


def free_share(setup: Setup) -> int | None:
    """Bytes of `free_memory` for each of the processes that share it."""
    free = free_memory(setup.device)
    return None if free is None else free // setup.processes


def value_of(name: str, setup: Setup, policy: PolicyConfig) -> object:
    """The value of the setting with this dotted name."""
    slots = [slot.name for slot in setup.shape.slots]
    known = setup._asdict() | {"envs": setup.num_envs, "slots": slots, "policy": policy}
    first, *rest = name.split(".")
    return reduce(getattr, rest, known[first])


def most_envs(setup: Setup, policy: PolicyConfig, free: int) -> int:
    """The largest N, at most that of the setup, that `needs` no more than `free` bytes; 0: none."""

    def excess(envs: int) -> int:
        return at_once(needs(lay_out(setup, envs), policy)) - free

    return bisect_right(range(1, setup.num_envs + 1), 0, key=excess)


def room_for_engine(setup: Setup, policy: PolicyConfig) -> int | None:
    """Bytes at most that a run leaves to what its engine keeps; None where nobody knows."""
    free = free_share(setup)
    others = [need for need in needs(setup, policy) if need.during not in (PASSED, UPDATED)]
    return None if free is None else free - at_once(others)


def needs_in_words(setup: Setup, policy: PolicyConfig, engine: Engine) -> str:
    """The memory that a run needs at least, its largest part, and what is free, for the log."""
    parts = needs(setup, policy, engine)
    largest = max(parts, key=lambda need: need.size)
    free = free_memory(setup.device)
    rest = "what is free is not known" if free is None else f"{free / GIB:.1f} GiB are free"
    most = f"{largest.size / MIB:,.0f} MiB of it for {largest.what}"
    return f"at least {at_once(parts) / MIB:,.0f} MiB on {setup.device} ({most}); {rest}"


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
