"""The settings of a run: one dataclass per part, composed into TrainConfig, and the checks that span parts.

Hydra validates names and types against these dataclasses; `settings_from` turns the composed configuration into them.
Imported by the trainer and by the entry point before torch is: needs no torch.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper_soa.agent.config import POLICIES, PolicyConfig
from esper_soa.env.config import (
    AttributionConfig,
    GatesConfig,
    GovernorConfig,
    LifecycleConfig,
    RewardConfig,
    SignalsConfig,
)
from esper_soa.errors import SettingError, UserError, check, check_choice
from esper_soa.nets.config import DataConfig, TaskConfig, enabled_slots
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS, HEAD_NAMES

DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
CONVOLUTIONS = ("channels_last", "planes", "matmul", "auto")
NATIVE_CHOICES = ("auto", "on", "off")
PROGRESS_STYLES = ("auto", "live", "plain", "off")
PROFILES = ("off", "phases", "torch")


@dataclass
class ComputeConfig:
    """How the work is laid out on the device; but for `precision`, changes speed, never results beyond rounding."""

    workers: int = 0  # CPU threads that share the chunks of envs; 0 = one per usable core (1 on a GPU)
    threads: int = 0  # CPU threads of one torch operation outside the workers; 0 = 1
    env_chunk: int = 0  # envs trained together; 0 = a few on a CPU, where caches decide, and all on a GPU
    precision: str = "auto"  # of the hosts: float32, bfloat16, float16; see nets/precision.py
    compile: bool = False  # compile the ledger kernels: slow to start, pays on long runs
    native: str = "auto"  # C kernels for float32 networks on a CPU: auto where a C compiler is found, on, off
    cuda_graphs: str = "off"  # replay work as CUDA graphs: auto = on an NVIDIA GPU, on, off, networks (no decisions)
    convolutions: str = "channels_last"  # torch's: channels_last, planes, matmul, auto = the quickest per shape
    triton: str = "off"  # own GPU kernels for the hosts' blocks: auto where they can run on an NVIDIA GPU, on, off

    def __post_init__(self) -> None:
        check_choice("compute.precision", self.precision, PRECISIONS)
        for name in ("native", "triton"):
            check_choice(f"compute.{name}", getattr(self, name), NATIVE_CHOICES)
        check_choice("compute.convolutions", self.convolutions, CONVOLUTIONS)
        check_choice("compute.cuda_graphs", self.cuda_graphs, (*NATIVE_CHOICES, "networks"))
        check(self.workers >= 0, "compute.workers", self.workers, "at least 0 (0 = one per usable core)")
        check(self.threads >= 0, "compute.threads", self.threads, "at least 0 (0 = 1)")
        check(self.env_chunk >= 0, "compute.env_chunk", self.env_chunk, "at least 0 (0 = automatic)")


def _collapsed_entropy() -> dict[str, float]:
    return {"slot": 0.10, "blueprint": 0.05, "style": 0.08, "tempo": 0.05, "alpha_target": 0.08, "alpha_speed": 0.08,
            "alpha_curve": 0.08, "op": 0.08}  # fmt: skip


@dataclass
class AnomalyConfig:
    """When a policy update counts as unhealthy; defaults are the reference's. Changes what is told, never results."""

    enabled: bool = True
    max_ratio: float = 5.0  # largest new over old probability of an action
    min_ratio: float = 0.1  # smallest
    max_ratio_error_first: float = 1e-3  # distance from 1 of that ratio before any step, where it should be 1
    max_value_loss: float = 5.0
    max_bellman_error: float = 5.0  # mean absolute temporal difference
    min_explained_variance: float = -0.5
    max_lstm_rms: float = 10.0  # of the hidden or cell state, in any env
    min_lstm_rms: float = 1e-6  # of the hidden state, in any env
    max_gradient_drift: float = 0.5  # distance of the gradient norm from its running mean, relative to it
    gradient_momentum: float = 0.99  # of that running mean
    entropy_collapse: dict[str, float] = field(default_factory=_collapsed_entropy)  # per head, entropy in [0, 1]
    patience: int = 3  # updates in a row before low entropy or low explained variance counts
    entropy_recovery: float = 1.5  # times entropy_collapse, above which a head counts as recovered

    def __post_init__(self) -> None:
        check(self.patience >= 1, "telemetry.anomaly.patience", self.patience, "at least 1")
        check(self.entropy_recovery >= 1, "telemetry.anomaly.entropy_recovery", self.entropy_recovery, "at least 1")
        check(0 <= self.gradient_momentum < 1, "telemetry.anomaly.gradient_momentum", self.gradient_momentum,
              "in [0, 1)")  # fmt: skip
        check(sorted(self.entropy_collapse) == sorted(HEAD_NAMES), "telemetry.anomaly.entropy_collapse",
              ", ".join(self.entropy_collapse), "a number for each of " + ", ".join(HEAD_NAMES))  # fmt: skip


@dataclass
class TelemetryConfig:
    """What is shown while a run goes on."""

    progress: str = "auto"  # live on a terminal and plain lines elsewhere, or force one: live, plain, off
    plain_interval: float = 10.0  # seconds between two plain lines
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)

    def __post_init__(self) -> None:
        check_choice("telemetry.progress", self.progress, PROGRESS_STYLES)
        check(self.plain_interval >= 0, "telemetry.plain_interval", self.plain_interval, "at least 0 seconds")


@dataclass
class TrainConfig:
    """A whole run: budget, place, and the settings of every part."""

    name: str = "train"  # of the run; names its folder
    seed: int = 42  # root of every random stream
    device: str = "auto"  # auto, cpu, cuda, cuda:<index>
    run_dir: str = ""  # folder of the run; "" = runs/<name>/<time>
    envs: int = 8  # N, hosts trained at the same time
    rounds: int = 10  # episodes of every env, each followed by one policy update
    steps: int = 40  # env-steps per episode
    batch_size: int = 32  # B, images per host mini-batch
    train_samples: int = 256  # T, training images per env-step and env
    val_samples: int = 256  # V, validation images per env-step and env
    slots: list[str] = field(default_factory=lambda: ["r0c0", "r0c1", "r0c2"])
    max_seeds: int = 0  # seeds that may be in one host at the same time; 0 = as many as slots
    baseline_comparison: bool = True  # also train the same hosts on the same data without growth, for the final table
    checkpoint_every: int = 5  # rounds between checkpoints; 0 = only at the end and on a signal
    checkpoint_keep: int = 2  # newest checkpoints that stay, beside the best
    profile: str = "off"  # phases: where the time goes, one line per update; torch: a trace of a few env-steps
    resume: str = ""  # a checkpoint or run folder to go on from; auto = the newest of this name, or of run_dir
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    signals: SignalsConfig = field(default_factory=SignalsConfig)
    governor: GovernorConfig = field(default_factory=GovernorConfig)
    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        _check_finite("", self)
        _check_run(self)
        _check_budget(self)
        enabled_slots(self.task, list(self.slots))
        _check_policy(self)


@dataclass
class EvaluateConfig:
    """An evaluation: which policies play how much. The world is that of the checkpoint's run."""

    checkpoint: str = ""  # a checkpoint, or a run folder, whose newest is taken
    policies: list[str] = field(default_factory=lambda: ["ppo", "heuristic", "random", "wait"])  # ppo: the learned one
    episodes: int = 4  # of every env and policy
    envs: int = 0  # 0 = as many as in training
    seed: int = 0  # of the evaluation's own hosts, data orders and draws, which training never meets
    deterministic: bool = True  # the learned policy takes its likeliest choice instead of sampling
    confidence: float = 0.95  # of the intervals
    name: str = "evaluation"
    run_dir: str = ""  # folder of the results; "" = runs/<name>/<time>
    device: str = "auto"
    data_root: str = ""  # where CIFAR-10 is here; "" = where it was in training
    progress: str = "auto"  # as telemetry.progress
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        check(bool(self.checkpoint), "checkpoint", "''", "a checkpoint or a run folder")
        check(self.checkpoint != "auto", "checkpoint", self.checkpoint, "a checkpoint or a run folder")
        check(len(self.policies) > 0, "policies", self.policies, "a list of some of " + ", ".join(POLICIES))
        for policy in self.policies:
            check_choice("policies", policy, POLICIES)
        check(len(set(self.policies)) == len(self.policies), "policies", self.policies, "without repetition")
        check(self.episodes >= 1, "episodes", self.episodes, "at least 1")
        check(self.envs >= 0, "envs", self.envs, "at least 0 (0 = as in training)")
        check(0 <= self.seed < 2**31, "seed", self.seed, "between 0 and 2147483647")
        check(0 < self.confidence < 1, "confidence", self.confidence, "between 0 and 1")
        check_choice("progress", self.progress, PROGRESS_STYLES)
        _check_place(self.name, self.device)


def register_schema() -> None:
    """Let Hydra check every composed key and type; `train.yaml` and `evaluate.yaml` build on these."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="evaluate_schema", node=EvaluateConfig)
    # Hydra copies the whole store for every group that --help lists, which took a second; it never changes a copy.
    vars(store)["__deepcopy__"] = lambda memo: store


def settings_from(composed: DictConfig) -> TrainConfig:
    """The checked settings of a composed configuration.

    Raises UserError with one message that names setting, value and remedy.
    """
    _check_keys("", composed, TrainConfig())
    settings = _checked(composed)
    if not isinstance(settings, TrainConfig):
        raise UserError("configuration: the primary config must list train_schema first in its defaults")
    return settings


def settings_from_mapping(settings: Mapping[str, object]) -> TrainConfig:
    """The checked settings that a checkpoint keeps as plain values."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), dict(settings))
    except OmegaConfBaseException as error:
        raise UserError(f"checkpoint: its settings are not those of this program ({_one_line(error)})") from error
    return settings_from(cast(DictConfig, merged))


def evaluation_from(composed: DictConfig) -> EvaluateConfig:
    """The checked settings of a composed evaluation; raises UserError."""
    settings = _checked(composed)
    if not isinstance(settings, EvaluateConfig):
        raise UserError("configuration: the primary config must list evaluate_schema first in its defaults")
    return settings


def _checked(composed: DictConfig) -> object:
    """The dataclass of a composed configuration, its checks passed."""
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"configuration: {_one_line(error)}") from error


def settings_yaml(settings: TrainConfig) -> str:
    """The settings as they stand in config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_keys(prefix: str, composed: DictConfig, part: object) -> None:
    """Refuse keys that `part` does not have: '+key=value' and a file may bring them past Hydra's own check."""
    if not is_dataclass(part):
        return
    known = [item.name for item in fields(part)]
    for key in map(str, composed):
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UserError(f"{prefix}{key}: there is no such setting." + (f" Did you mean {near[0]}?" if near else ""))
        if is_dataclass(getattr(part, key)):
            _check_keys(f"{prefix}{key}.", composed[key], getattr(part, key))


def _check_finite(prefix: str, settings: object) -> None:
    """Refuse NaN and infinity in every number, however deeply nested."""
    if not is_dataclass(settings):
        return
    for item in fields(settings):
        value, path = getattr(settings, item.name), prefix + item.name
        numbers: Mapping[str, object] = value if isinstance(value, Mapping) else {"": value}
        for key, number in numbers.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise SettingError(f"{path}.{key}" if key else path, number, "a finite number")
        _check_finite(path + ".", value)


def _check_place(name: str, device: str) -> None:
    check(bool(re.fullmatch(r"[\w.+-]+", name)) and name.strip(".") != "", "name", name,
          "a folder name of letters, digits, '_', '-', '+' and '.'")  # fmt: skip
    check(DEVICE_PATTERN.fullmatch(device) is not None, "device", device, "auto, cpu, cuda or cuda:<index>")


def _check_run(run: TrainConfig) -> None:
    _check_place(run.name, run.device)
    check(0 <= run.seed < 2**31, "seed", run.seed, "between 0 and 2147483647")
    check_choice("profile", run.profile, PROFILES)
    check(run.checkpoint_every >= 0, "checkpoint_every", run.checkpoint_every, "at least 0 rounds (0 = at the end)")
    check(run.checkpoint_keep >= 1, "checkpoint_keep", run.checkpoint_keep, "at least 1")


def _check_budget(run: TrainConfig) -> None:
    for name in ("envs", "rounds", "steps", "train_samples", "val_samples"):
        check(getattr(run, name) >= 1, name, getattr(run, name), "at least 1")
    check(run.max_seeds >= 0, "max_seeds", run.max_seeds, "at least 0 (0 = as many as slots)")
    check(run.batch_size >= 2, "batch_size", run.batch_size, "at least 2", "BatchNorm needs two images in a batch.")
    over = run.train_samples % run.batch_size
    if over and not run.data.split:
        nearest = [count for count in (run.train_samples - over, run.train_samples - over + run.batch_size) if count]
        raise SettingError("train_samples", run.train_samples, f"a multiple of batch_size={run.batch_size}",
                           f"Nearest: {' or '.join(map(str, nearest))}.")  # fmt: skip


def _check_policy(run: TrainConfig) -> None:
    policy = run.policy
    if policy.name == "ppo":
        check(policy.ppo.minibatches <= run.envs, "policy.ppo.minibatches", policy.ppo.minibatches,
              f"at most envs={run.envs}", "Mini-batches are groups of whole envs.")  # fmt: skip
    for name in ("entropy_multiplier", "entropy_floor", "entropy_floor_penalty", "probability_floor"):
        heads = tuple(getattr(policy.ppo, name))
        check(sorted(heads) == sorted(HEAD_NAMES), f"policy.ppo.{name}", ", ".join(heads),
              "a number for each of " + ", ".join(HEAD_NAMES))  # fmt: skip
    _check_blueprints(run, "policy.schedule.blueprint", [policy.schedule.blueprint], policy.name == "schedule")
    _check_blueprints(run, "policy.heuristic.blueprint_rotation", policy.heuristic.blueprint_rotation,
                      policy.name == "heuristic")  # fmt: skip


def _check_blueprints(run: TrainConfig, setting: str, blueprints: Sequence[str], used: bool) -> None:
    """Blueprints must exist, and those of the policy in use must be among the task's."""
    known = tuple(BLUEPRINT_NAMES[code] for code in CNN_BLUEPRINTS)
    for blueprint in blueprints:
        check_choice(setting, blueprint, known)
        check(not used or blueprint in run.task.blueprints, setting, blueprint,
              "one of task.blueprints: " + ", ".join(run.task.blueprints))  # fmt: skip
