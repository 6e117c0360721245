"""Settings of benchmarks/eps.py: the declared work of an env-step, how it is timed, and what is
compared with what.

Checked before anything is built; benchmarks/conf/ holds the named works. Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from esper_soa.config.agent import PolicyConfig
from esper_soa.config.env import LifecycleConfig
from esper_soa.config.nets import SEQUENCES, DataConfig, SlotSpec, TaskConfig, host_slots
from esper_soa.config.registry import is_reference
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.system.errors import check, check_choice

SIDES = ("engine", "baseline", "bare")
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
    values: list[int] = field(default_factory=list)  # of that setting
    envs: int = 16  # N
    batch_size: int = 125  # B
    train_samples: int = 500  # T, training images per env-step and env
    val_samples: int = 125  # V, validation images per env-step and env
    num_slots: int = 3  # S, the first of the host in row-major order
    live: int = 0  # live seeds of every env, BLENDING at alpha 0.5 all the time
    blueprint: str = "conv_light"  # of the live seeds
    # The policy's actions are carried out, in hosts without seeds, as in a run; the engine alone.
    grow: bool = False
    steps: int = 150  # env-steps of an episode, over which an update is shared out
    update: bool = True  # time the PPO update too
    timed_steps: int = 2  # env-steps of all envs in one timing
    repeats: int = 5  # timings of each side, in turns
    percentile_steps: int = 100  # env-steps of all envs that percentiles are of
    warmup: int = 1  # untimed env-steps before
    bank: int = MIN_IMAGES  # training images that there are at least
    device: str = "auto"  # as in a run
    seed: int = 1  # root of every random stream
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
        seedless = "bare" not in self.sides or self.live == 0
        remedy = "Bare hosts have no seeds."
        check(seedless, "sides", self.sides, "without bare where live is above 0", remedy)
        check_choice("blueprint", self.blueprint, tuple(self.task.blueprints))
        scaled = self.compute.precision == "float16"
        check(not scaled, "compute.precision", "float16", "without loss scales, which no loop has")
        hosts = "without bare where hosts read text"
        check("bare" not in self.sides or self.targets == 1, "sides", self.sides, hosts)
        most = {
            "num_slots": len(slots_of(self.task)),
            "live": min(self.num_slots, 4),  # beyond 4 not every subset is evaluated
            "timed_steps": self.steps - self.warmup,
        }
        least = {"warmup": 1, "num_slots": 1, "timed_steps": 1, "repeats": 2, "live": 0}
        for name, low in least.items():
            value = getattr(self, name)
            check(value >= low, name, value, f"at least {low}")
            check(value <= most.get(name, value), name, value, f"at most {most.get(name)}")
        fits = not self.grow or (self.sides == ["engine"] and self.live == 0)
        check(fits, "grow", self.grow, "with sides=[engine] and live=0")
        check(self.policy.name == "ppo", "policy.name", self.policy.name, "ppo")
        self.points()
        train_config(self)

    @property
    def slots(self) -> list[str]:
        """Names of the enabled slots."""
        return [spec.name for spec in slots_of(self.task)[: self.num_slots]]

    @property
    def rows(self) -> int:
        """K: subset rows that an env is validated under."""
        return 2**self.live

    @property
    def targets(self) -> int:
        """Answers that a sample has: tokens of a sequence, one of an image."""
        return self.task.transformer.context if self.text else 1

    @property
    def text(self) -> bool:
        """Whether hosts read text."""
        return slots_of(self.task)[0].topology == SEQUENCES

    @property
    def images(self) -> tuple[int, int]:
        """Training images (or tokens), and those of validation times subset rows, of one env-step
        of all envs.
        """
        train, val = self.train_samples, self.rows * self.val_samples
        return self.envs * self.targets * train, self.envs * self.targets * val

    def points(self) -> list["EpsConfig"]:
        """The works that are compared: one per value of the setting that varies."""
        if not self.vary:
            return [self]
        check_choice("vary", self.vary, NUMBERS)
        check(len(self.values) > 0, "values", self.values, f"a list of values for {self.vary}")
        changes: list[dict] = [{self.vary: value} for value in self.values]
        return [replace(self, vary="", values=[], **change) for change in changes]


def slots_of(task: TaskConfig) -> Sequence[SlotSpec]:
    """Those of the package's hosts; a user's has the first three too, behind its children."""
    return host_slots(replace(task, host="chain") if is_reference(task.host) else task)


NUMBERS = tuple(item.name for item in fields(EpsConfig) if item.type is int)


def train_config(cfg: EpsConfig) -> TrainConfig:
    """The run whose env-steps the engine is timed in: seeds advance by no rule of their own, unless
    they grow.
    """
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
        data=DataConfig(name="text", context=cfg.targets)
        if cfg.text
        else DataConfig(
            name="synthetic",
            synthetic_train=max(cfg.bank, cfg.train_samples),
            synthetic_test=cfg.val_samples,
        ),
        lifecycle=LifecycleConfig(
            auto_forward_g1=cfg.grow, auto_forward_g2=cfg.grow, auto_forward_g3=cfg.grow
        ),
        policy=cfg.policy,
        compute=cfg.compute,
    )
