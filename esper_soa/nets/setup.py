"""The record of all that is decided of networks and their work before anything is built.

training/loop/build.py makes it of the settings; `lay_out` decides how the work is laid out on the
device: networks and samples of a pass, workers, precision.
"""

from typing import NamedTuple

import torch

from esper_soa.config.nets import DEFAULT_ROWS, DataConfig, SubsetRows, TaskConfig
from esper_soa.config.settings import ComputeConfig, EffectsConfig
from esper_soa.nets.data.batches import SampleCount, SampleSpec
from esper_soa.nets.data.images import IMAGES
from esper_soa.nets.model.host import MOST_INDEXED, HostShape, activation_elements
from esper_soa.nets.model.user_segment import UserHost
from esper_soa.nets.precision import choose_precision
from esper_soa.nets.seeds.subsets import max_rows
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import check

# training images of a forward pass on a CPU: fewer cost calls, more fall out of the caches
CPU_CHUNK_IMAGES = 512
CPU_EVAL_BATCH = 16
# Multiplications of a training batch from which a module of a user is quicker env by env than under
# vmap, whose grouped convolutions are slow on a CPU: below, calls cost more.
ENV_PRODUCTS = 2**25
ENV_EVAL_BATCH = 128  # of modules env by env, whose calls cost more than what leaves the caches
GPU_EVAL_BATCH = 256
THREADS_PER_CORE = 4  # most that may be asked for: more only wait for each other


class Setup(NamedTuple):
    """Networks of a process, their work, and how it is laid out on the device: plain data."""

    shape: HostShape
    task: TaskConfig
    detached_stages: tuple[int, ...]
    # Layout: what `compute` comes to for these networks on this device.
    env_chunk: int  # networks per forward pass
    eval_batch: int  # validation samples per forward pass
    workers: int = 1  # threads that chunks of envs are shared among
    precision: torch.dtype = torch.float32  # of activations, where it has 16 bits; see precision.py
    device: torch.device = torch.device("cpu")
    processes: int = 1  # which share the memory of the device, with as much work each
    compute: ComputeConfig = ComputeConfig()  # as asked for
    # Work of an env-step.
    num_envs: int = 1  # N of this process
    batch_size: int = 32  # B
    train_samples: int = 256  # T
    val_samples: int = 256  # V
    steps: int = 40  # env-steps per episode
    seed: int = 0  # root of the random streams of the run
    accumulate: int = 1  # batches whose mean gradient makes one optimiser step
    rows: SubsetRows = DEFAULT_ROWS  # subsets of seeds to validate
    # Samples.
    spec: SampleSpec = IMAGES
    data: DataConfig = DataConfig()
    effects: EffectsConfig = EffectsConfig()  # twins beside the N envs
    unread: SampleCount = SampleCount(0, 0)  # that files of users hold, still to be loaded
    # Numbers of an observation, which a policy needs memory for.
    env_features: int = 0  # about an env
    slot_features: int = 0  # about each of its slots


def lay_out(setup: Setup, num_envs: int) -> Setup:
    """The setup for so many envs: as much at once as suits its device, as `setup.compute` asks, and
    with every tensor within its bound (model/host.py).

    Raises SettingError for settings that the device cannot follow.
    """
    compute = setup.compute
    device = setup.device
    rows = max_rows(len(setup.shape.slots), setup.rows)
    inputs = setup.spec.elements
    validation_elements = activation_elements(setup.shape, inputs, rows)
    trained = setup.batch_size * activation_elements(setup.shape, inputs)
    heavy = setup.batch_size * setup.shape.products >= ENV_PRODUCTS
    by_env = device.type == "cpu" and heavy and isinstance(setup.shape.modules, UserHost)
    chunk = choose_env_chunk(
        compute.env_chunk or int(by_env),
        num_envs,
        setup.batch_size,
        device=device,
        elements=max(trained, validation_elements),
    )
    return setup._replace(
        num_envs=num_envs,
        env_chunk=chunk,
        eval_batch=ENV_EVAL_BATCH
        if by_env and chunk == 1
        else choose_eval_batch(device, elements=chunk * validation_elements),
        workers=choose_workers(compute.workers, -(-num_envs // chunk), device),
        precision=choose_precision(compute.precision, device).dtype,
    )


def choose_env_chunk(
    setting: int, envs: int, batch: int, device: torch.device, cores: int = 0, elements: int = 1
) -> int:
    """Envs that are trained together: the setting, or for 0 what suits the device; at most all.

    All on a GPU, as far as no tensor, of which each env has `elements`, gets more than
    MOST_INDEXED of them; raises SettingError for a setting beyond that, and where an env has more.
    On a CPU as many as have CPU_CHUNK_IMAGES in their batches, such that `cores` (0 = the usable
    ones) have equal shares. The number of workers plays no part: another number changes no
    rounding.
    """
    if device.type != "cpu":
        most = MOST_INDEXED // elements
        words = f"A tensor of {device.type} has at most {MOST_INDEXED} elements."
        largest = f"at most {batch * MOST_INDEXED // elements} with these hosts"
        check(most > 0, "batch_size", batch, allowed=largest, remedy=words)
        fits = min(setting, envs) <= most
        check(fits, "compute.env_chunk", setting, allowed=f"at most {most} here", remedy=words)
        return min(setting or envs, envs, most)
    if setting > 0:
        return min(setting, envs)
    cores = cores or usable_cores()
    most = max(1, CPU_CHUNK_IMAGES // batch)
    shares = -(-envs // (most * cores)) * cores
    return -(-envs // min(shares, envs))


def choose_eval_batch(device: torch.device, elements: int = 1) -> int:
    """Validation images per forward pass: few on a CPU, where caches decide.

    elements: of the largest tensor per image, of all envs that are validated together.
    """
    if device.type != "cpu":
        return max(1, min(GPU_EVAL_BATCH, MOST_INDEXED // elements))
    return CPU_EVAL_BATCH


def choose_workers(setting: int, chunks: int, device: torch.device, cores: int = 0) -> int:
    """Threads that share chunks of envs: the setting, or for 0 one per usable core of a CPU.

    Never more than there are chunks, and one on a GPU. SettingError for more than make sense.
    """
    check_threads("compute.workers", setting)
    if device.type != "cpu":
        allowed = f"0 or 1 on {device.type}"
        check(
            setting <= 1,
            "compute.workers",
            setting,
            allowed=allowed,
            remedy="Workers share the CPU's cores.",
        )
        return 1
    return min(setting or cores or usable_cores(), chunks)


def check_threads(setting: str, count: int) -> None:
    """Raise SettingError for more threads than THREADS_PER_CORE per core."""
    most = THREADS_PER_CORE * usable_cores()
    remedy = f"That is {THREADS_PER_CORE} per usable core."
    check(count <= most, setting, count, allowed=f"at most {most} here", remedy=remedy)
