"""Settings of the host networks and their data, and the slot table that follows from them. Needs no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from esper_soa.errors import SettingError, check, check_choice
from esper_soa.paths import user_path
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS

IMAGE_SIZE = 32
IMAGE_CHANNELS = 3
DATASETS = ("auto", "cifar10", "fashion32", "synthetic")


@dataclass
class TaskConfig:
    """Host architecture and the settings of its training (lifecycle.md 5.1, 5.4, 6.1)."""

    name: str = "cifar_baseline"
    base_channels: int = 8  # channels of block 0; doubled by every block
    num_blocks: int = 3
    kernel_size: int = 3
    num_pools: int = 3  # the first num_pools blocks end in a 2x2 max pool
    num_classes: int = 10
    host_lr: float = 0.01
    seed_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4  # of the host; seeds have none
    max_grad_norm: float = 1.0  # per env for the host, per env and slot for seeds; 0 = no clipping
    gradient_stride: int = 10  # training batches between two measurements of seed gradients
    blueprints: list[str] = field(default_factory=lambda: [BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS])

    def __post_init__(self) -> None:
        check(self.base_channels >= 1, "task.base_channels", self.base_channels, "at least 1")
        check(self.num_blocks >= 2, "task.num_blocks", self.num_blocks, "at least 2")
        check(self.kernel_size % 2 == 1, "task.kernel_size", self.kernel_size, "odd")
        check(0 <= self.num_pools <= min(self.num_blocks, 5), "task.num_pools", self.num_pools,
              f"between 0 and {min(self.num_blocks, 5)}")  # fmt: skip
        check(self.num_classes >= 2, "task.num_classes", self.num_classes, "at least 2")
        for name in ("host_lr", "seed_lr"):
            check(getattr(self, name) > 0, f"task.{name}", getattr(self, name), "above 0")
        check(0 <= self.momentum < 1, "task.momentum", self.momentum, "in [0, 1)")
        check(self.weight_decay >= 0, "task.weight_decay", self.weight_decay, "at least 0")
        check(self.max_grad_norm >= 0, "task.max_grad_norm", self.max_grad_norm, "at least 0 (0 = no clipping)")
        check(self.gradient_stride >= 1, "task.gradient_stride", self.gradient_stride, "at least 1")
        known = tuple(BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS)
        check(len(self.blueprints) > 0, "task.blueprints", self.blueprints, "a list with at least one blueprint")
        for blueprint in self.blueprints:
            check_choice("task.blueprints", blueprint, known)
        check(len(set(self.blueprints)) == len(self.blueprints), "task.blueprints", self.blueprints,
              "without repetition")  # fmt: skip


@dataclass
class DataConfig:
    """Which images, from where, and how an env-step draws them (runtime.md 2)."""

    name: str = "auto"  # auto takes CIFAR-10 where root holds it, else the embedded fashion32
    root: str = ""  # folder or archive of CIFAR-10 (cifar-10-batches-py, -bin, or the .tar.gz); "" = none
    augment: bool = True  # random crop with padding 4 and horizontal flip, training only
    split: bool = False  # the reference's rule: one pass over the data set is split over the envs
    synthetic_train: int = 512  # images of the synthetic set
    synthetic_test: int = 256

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, DATASETS)
        check(not self.root or self.name in ("auto", "cifar10"), "data.root", self.root,
              f"empty with data.name={self.name}", "Take data.name=cifar10 for the files there.")  # fmt: skip
        user_path("data.root", self.root)
        check(self.synthetic_train >= 1, "data.synthetic_train", self.synthetic_train, "at least 1")
        check(self.synthetic_test >= 1, "data.synthetic_test", self.synthetic_test, "at least 1")


class SubsetRows(NamedTuple):
    """Subsets to validate, beside the few that rewards need, where more seeds than evaluation.EXACT_SLOTS are ablated.

    Of a code only the bits of ablated seeds count.
    """

    pairs: bool = True  # each two on their own
    codes: tuple[int, ...] = ()  # distinct bit masks over slot numbers


DEFAULT_ROWS = SubsetRows()


class SlotSpec(NamedTuple):
    """Place of a seed slot in the host: row 0 before the pool of its block (after ReLU), row 1 after it."""

    name: str
    row: int
    block: int
    channels: int
    size: int  # height and width of the feature map


def host_slots(task: TaskConfig) -> tuple[SlotSpec, ...]:
    """Every slot that the host offers, row-major (r0c0, r0c1, ..., r1c0, ...), which is the order of actions."""
    channels = [task.base_channels * 2**block for block in range(task.num_blocks)]
    before = [IMAGE_SIZE // 2 ** min(block, task.num_pools) for block in range(task.num_blocks)]
    row0 = [SlotSpec(f"r0c{b}", 0, b, channels[b], before[b]) for b in range(task.num_blocks)]
    row1 = [SlotSpec(f"r1c{b}", 1, b, channels[b], before[b] // 2) for b in range(task.num_pools)]
    return tuple(row0 + row1)


def enabled_slots(task: TaskConfig, names: list[str]) -> tuple[SlotSpec, ...]:
    """Slots of the run in row-major order; `names` may come in any order.

    Raises SettingError for an empty list, a repeated name, or a name that the host does not have.
    """
    offered = host_slots(task)
    allowed = ", ".join(spec.name for spec in offered)
    if not names:
        raise SettingError("slots", names, f"a non-empty list of slots of {task.name}: {allowed}")
    if len(set(names)) != len(names):
        raise SettingError("slots", names, "without repetition", "Name every slot once.")
    unknown = [name for name in names if name not in {spec.name for spec in offered}]
    if unknown:
        raise SettingError("slots", unknown[0], f"a slot of {task.name}: {allowed}")
    return tuple(spec for spec in offered if spec.name in names)
