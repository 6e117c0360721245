"""Settings of benchmarks/eps.py: the declared work of an env-step, how it is timed, and what is
compared with what.

Checked before anything is built; benchmarks/conf/ holds the named works. Needs no torch.
"""

import os
from copy import deepcopy
from dataclasses import dataclass, field, fields

from esper_soa.agent.config import PolicyConfig
from esper_soa.config import ComputeConfig, TrainConfig
from esper_soa.env.config import LifecycleConfig
from esper_soa.errors import SettingError, check, check_choice
from esper_soa.nets.config import DataConfig, TaskConfig, host_slots
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS

SIDES = ("engine", "baseline", "bare")
STAGES = ("training", "blending", "holding", "fossilized")
VALIDATIONS = ("auto", "separate", "fused")
HOWS = ("auto", "eager", "compile")
MIN_IMAGES = 1024  # of the synthetic training set


def _benchmark_policy() -> PolicyConfig:
    policy = PolicyConfig()
    policy.ppo.target_kl = 0.0  # every epoch is done, whatever the policy learns
    return policy


@dataclass
class EpsConfig:
    """One benchmark: a work, the sides that do it, and the setting that its points differ in."""

    name: str = "custom"  # of the work; results are appended to <results>/<name>.jsonl
    # And bare: hosts alone.
    sides: list[str] = field(default_factory=lambda: ["engine", "baseline"])
    vary: str = ""  # setting in which the points differ; "" = one point
    # Of that setting; empty with compute.*: 1, 2, 4 ... cores.
    values: list[float] = field(default_factory=list)
    envs: int = 16  # N
    batch_size: int = 125  # B
    train_samples: int = 500  # T, training images per env-step and env
    val_samples: int = 125  # V, validation images per env-step and env
    num_slots: int = 3  # S, the first of the host in row-major order
    live: int = 0  # live seeds in an env that has any; they stay as they are during the timing
    live_share: float = 1.0  # share of the envs that have live seeds
    blueprint: str = "conv_light"  # of the live seeds
    stage: str = "blending"  # of the live seeds; in blending their alpha is 0.5
    steps: int = 150  # env-steps of an episode, over which an update is shared out
    update: bool = True  # time the PPO update too
    timed_steps: int = 2  # env-steps of all envs in one timing
    repeats: int = 5  # timings of each side, in turns
    warmup: int = 1  # untimed env-steps before
    bank: int = MIN_IMAGES  # training images that there are at least
    augment: bool = True  # random crops and mirroring, on both sides
    device: str = "auto"  # as in a run
    seed: int = 1  # root of every random stream
    # Of each process of a loop; 0 = 1, 2, 4 ... cores, whichever is fastest.
    baseline_threads: int = 0
    # That a loop is shared out over; 0 = one or one per core, whichever is faster.
    baseline_processes: int = 0
    # One pass per subset or all in one; auto = whichever is faster.
    baseline_validation: str = "auto"
    bare_how: str = "auto"  # eager or compile (torch.compile); auto = whichever is faster
    limits: bool = True  # measure what the machine can do at most
    # Folder of the results, this one for commits only; "" = they are only printed.
    results: str = "benchmarks/results"
    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=_benchmark_policy)
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        check(len(self.sides) > 0, "sides", self.sides, "a list of " + ", ".join(SIDES))
        for side in self.sides:
            check_choice("sides", side, SIDES)
        check_choice("stage", self.stage, STAGES)
        check_choice(
            "blueprint", self.blueprint, tuple(BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS)
        )
        check_choice("baseline_validation", self.baseline_validation, VALIDATIONS)
        check_choice("bare_how", self.bare_how, HOWS)
        for name in (
            "envs",
            "train_samples",
            "val_samples",
            "num_slots",
            "steps",
            "timed_steps",
            "warmup",
            "bank",
        ):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        check(
            "bare" not in self.sides or self.live == 0,
            "sides",
            self.sides,
            "without bare where live is above 0",
            "Bare hosts have no seeds.",
        )
        check(self.baseline_threads >= 0, "baseline_threads", self.baseline_threads, "at least 0")
        check(
            0 <= self.baseline_processes <= self.envs,
            "baseline_processes",
            self.baseline_processes,
            f"between 0 and envs={self.envs}",
        )
        check(
            self.repeats >= 2, "repeats", self.repeats, "at least 2", "A spread needs two timings."
        )
        most = len(host_slots(self.task))
        check(
            self.num_slots <= most,
            "num_slots",
            self.num_slots,
            f"at most {most}, the slots of {self.task.name}",
        )
        check(
            0 <= self.live <= self.num_slots,
            "live",
            self.live,
            f"between 0 and num_slots={self.num_slots}",
        )
        check(
            self.live <= 4, "live", self.live, "at most 4", "Beyond, not every subset is evaluated."
        )
        check(0 <= self.live_share <= 1, "live_share", self.live_share, "between 0 and 1")
        check(
            self.timed_steps + self.warmup <= self.steps,
            "timed_steps",
            self.timed_steps,
            f"at most steps - warmup = {self.steps - self.warmup}",
        )
        check(self.policy.name == "ppo", "policy.name", self.policy.name, "ppo")
        if self.vary:
            self.points()
        train_config(self)

    @property
    def slots(self) -> list[str]:
        """Names of the enabled slots."""
        return [spec.name for spec in host_slots(self.task)[: self.num_slots]]

    @property
    def live_envs(self) -> int:
        """Envs that have live seeds: the first ones."""
        return round(self.live_share * self.envs) if self.live else 0

    @property
    def rows(self) -> int:
        """K: most subset rows that an env is validated under: those of one with live seeds."""
        return 2**self.live if self.live_envs and self.stage in ("blending", "holding") else 1

    @property
    def images(self) -> tuple[int, int]:
        """Training images, and validation images times subset rows, of one env-step of all envs."""
        rows = self.live_envs * self.rows + self.envs - self.live_envs
        return self.envs * self.train_samples, rows * self.val_samples

    def points(self) -> list["EpsConfig"]:
        """The works that are compared: one per value of the setting that varies."""
        if not self.vary:
            return [self]
        path = self.vary.split(".")
        values = self.values or (doublings(cores()) if path[0] == "compute" else [])
        check(len(values) > 0, "values", self.values, f"a list of values for {self.vary}")
        return [_with(self, path, value) for value in values]


def _with(cfg: EpsConfig, path: list[str], value: float) -> EpsConfig:
    """`cfg` with the number at `path` replaced, and nothing left to vary."""
    changed = deepcopy(cfg)
    changed.vary = ""
    changed.values = []
    part: EpsConfig | ComputeConfig = changed.compute if path[0] == "compute" else changed
    numbers = {item.name: item.type for item in fields(part) if item.type in (int, float)}
    if path[-1] not in numbers or len(path) != 1 + (path[0] == "compute"):
        raise SettingError(
            "vary", ".".join(path), "compute.<number> or one of " + ", ".join(numbers)
        )
    setattr(part, path[-1], int(value) if numbers[path[-1]] is int else value)
    changed.compute.__post_init__()
    changed.__post_init__()
    return changed


def train_config(cfg: EpsConfig) -> TrainConfig:
    """The run whose env-steps the engine is timed in: seeds advance by no rule of their own."""
    return TrainConfig(
        name="benchmark",
        seed=cfg.seed,
        device=cfg.device,
        envs=cfg.envs,
        rounds=1,
        steps=cfg.steps,
        batch_size=cfg.batch_size,
        train_samples=cfg.train_samples,
        val_samples=cfg.val_samples,
        slots=cfg.slots,
        task=cfg.task,
        data=DataConfig(
            name="synthetic",
            augment=cfg.augment,
            synthetic_train=max(cfg.bank, cfg.train_samples),
            synthetic_test=cfg.val_samples,
        ),
        lifecycle=LifecycleConfig(
            auto_forward_g1=False, auto_forward_g2=False, auto_forward_g3=False
        ),
        policy=cfg.policy,
        compute=cfg.compute,
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def doublings(most: int) -> list[float]:
    """1, 2, 4 ... and `most`."""
    powers = [float(2**power) for power in range(most.bit_length()) if 2**power < most]
    return [*powers, float(most)]
