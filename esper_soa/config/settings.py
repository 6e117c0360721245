"""Settings of a run: a dataclass per part, composed into TrainConfig, and checks that span parts.

Hydra validates names and types against them. Needs no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar, cast

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config import env, nets
from esper_soa.config.agent import POLICIES, SCRATCH, PolicyConfig
from esper_soa.config.arguments import check_key
from esper_soa.config.gone import drop_gone, join_split
from esper_soa.config.hydra_versions import register_resolver
from esper_soa.config.ranges import (
    COUNT,
    Settings,
    TextPattern,
    choice,
    choice_or_list,
    choices,
    env_words,
    number,
    weight,
    word,
)
from esper_soa.config.registry import AGENT, is_reference
from esper_soa.system.errors import UserError, check, reading, single_line
from esper_soa.vocabulary import HEAD_NAMES, head_sizes

DEVICE = TextPattern(re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?"), "auto, cpu, cuda or cuda:<index>")
HORIZON = TextPattern(re.compile(r"end|[1-9][0-9]{0,5}"), "end, or a number of env-steps")
MAX_ENVS = 2**20
MAX_SEED = 2**31 - 1
SWITCHES = ("auto", "on", "off")
ENGINES = ("auto", "native", "torch", "triton", "triton_graphs")  # see nets/choose.py
PROGRESS_STYLES = ("auto", "live", "plain", "off")
# see controls.py; the first of them do not grow
STATIC_CONTROLS = ("wait", "static_final", "static_large")
CONTROLS = (*STATIC_CONTROLS, "random", "heuristic", "schedule")
BUDGETS = ("steps", "images", "flop")
# The modules of that folder; none is imported before it is asked for.
TRACKER_FOLDER = Path(__file__).parents[1] / "lab/telemetry/trackers"
TRACKERS = tuple(module.name for module in iter_modules([str(TRACKER_FOLDER)]))
if not TRACKERS:
    TRACKERS = ("[], as esper_soa.lab.telemetry is not installed",)
UNIVERSAL_BLUEPRINT = "norm"  # of the package, fits the slots of all its hosts
LEVELS = ("off", "rounds", "events", "full")  # of telemetry: each writes what those before it do
WIDTHS = " or ".join(names[0] for names in nets.SIZE_SETTINGS.values())
# what makes a run smaller
LOWER = f"envs, batch_size, steps, train_samples, the width of the hosts ({WIDTHS}), "
LOWER += "policy.network.hidden or compute.env_chunk"
Kind = TypeVar("Kind", bound=Settings)


@dataclass
class ComputeConfig(Settings, path="compute."):
    """Layout of the work on the device; all but `precision` change results by rounding alone."""

    # CPU threads that share chunks of envs, in training and in the policy's update; 1 on a GPU.
    workers: int = number(0, 0, 1024, note="0 = one per usable core")
    # CPU threads of a torch operation outside the workers.
    threads: int = number(0, 0, 1024, note="0 = 1")
    # Envs trained together; 0 = a few on a CPU, where caches decide, and all on a GPU.
    env_chunk: int = number(0, 0, MAX_ENVS, note="0 = automatic")
    precision: str = choice("auto", ("auto", "float32", "bfloat16", "float16"))  # of the hosts
    # Kernels of the state machine as compiled code: auto = on a CPU those that the cache has, on =
    # compile before the run; see runtime/step_cache.py and compilation.py.
    compile: str = choice("auto", SWITCHES)
    # Program that runs networks: auto = on a CPU the C kernels where they are proven, on a GPU the
    # Triton kernels where they agree with torch when they are tried; a name insists on it.
    engine: str = choice("auto", ENGINES)
    # Replay what decides (state machine, policy, gradient steps) as CUDA graphs: auto = on an
    # NVIDIA GPU, as far as captures go well; on insists.
    cuda_graphs: str = choice("auto", SWITCHES)


@dataclass
class AnomalyConfig(Settings, path="telemetry.anomaly."):
    """Whether unhealthy policy updates are looked for, by training/results/anomalies.py."""

    enabled: bool = True  # False: nothing is looked for
    max_lstm_rms: float = weight(10.0)  # of the hidden or cell state, in any env


@dataclass
class TelemetryConfig(Settings, path="telemetry."):
    """Console output and recording of a run."""

    level: str = choice("events", LEVELS)  # rounds: lines of JSON; events: tables too; full: all
    # Rounds that are recorded at level full after an anomaly begins.
    escalation: int = number(0, 0, COUNT, note="0 = off")
    write_interval: float = number(10.0, 0, 86_400)  # seconds between writings of a round
    console: str = choice("bar", ("bar", "envs"))  # envs: a table below the bar, from events on
    progress: str = choice("auto", PROGRESS_STYLES)  # auto: live on a terminal, else plain lines
    plain_interval: float = number(10.0, 0, 86_400)  # seconds between two plain lines
    anomaly: AnomalyConfig = field(default_factory=AnomalyConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        recorded = self.console == "bar" or LEVELS.index(self.level) >= LEVELS.index("events")
        remedy = "The table is made of what the level events records."
        self.require(recorded, "console", f"bar with telemetry.level={self.level}", remedy=remedy)
        silent = self.level == "off" and self.escalation > 0
        self.require(not silent, "escalation", "0 with telemetry.level=off")


@dataclass
class EffectsConfig(Settings, path="effects."):
    """Twins, hosts that do without an action: what it brought is the difference (lab/effects)."""

    # Ops whose actions are measured.
    ops: list[str] = choices((), ("germinate", "fossilize", "prune"), least=0)
    rows: int = number(8, 1, MAX_ENVS)  # hosts beside `envs` that sleep until they are twins
    horizon: str = word("end", HORIZON)  # env-steps for which a twin does without the action
    share: float = number(1.0, 0, 1, ends="(]")  # of the actions, drawn
    # Share of the twins that are placebos, drawn among the measured actions: they take the action
    # too, and have one weight that is moved by a part in a million.
    placebo: float = number(0.25, 0, 0.5)

    @property
    def sleepers(self) -> int:
        """Hosts beside `envs` that there are."""
        return self.rows if self.ops else 0


@dataclass
class WorldConfig(Settings):
    """Hosts of one task: how many, what they are, what they learn from, and by which rules."""

    envs: int = number(8, 1, MAX_ENVS)  # N, hosts trained at the same time, of each task
    # B, images per host mini-batch.
    batch_size: int = number(32, 2, 1_000_000, note="BatchNorm needs two images in a batch")
    # Batches whose mean gradient makes an optimiser step; batch norm sees each by itself.
    accumulate: int = number(1, 1, 1_000_000)
    train_samples: int = number(256, 1, COUNT)  # T, training images per env-step and env
    val_samples: int = number(256, 1, COUNT)  # V, validation images per env-step and env
    # Places in the host that may hold seeds; a number stands for so many from the first on.
    slots: list[str] = field(default_factory=lambda: ["r0c0", "r0c1", "r0c2"])
    max_seeds: int = number(0, 0, COUNT, note="0 = as many as slots")  # in a host at a time
    task: nets.TaskConfig = field(default_factory=nets.TaskConfig)
    data: nets.DataConfig = field(default_factory=nets.DataConfig)
    reward: env.RewardConfig = field(default_factory=env.RewardConfig)
    lifecycle: env.LifecycleConfig = field(default_factory=env.LifecycleConfig)
    gates: env.GatesConfig = field(default_factory=env.GatesConfig)
    signals: env.SignalsConfig = field(default_factory=env.SignalsConfig)
    governor: env.GovernorConfig = field(default_factory=env.GovernorConfig)
    early_stop: env.EarlyStopConfig = field(default_factory=env.EarlyStopConfig)
    attribution: env.AttributionConfig = field(default_factory=env.AttributionConfig)


# Settings that each of several tasks may have of its own.
OF_A_TASK = tuple(item.name for item in fields(WorldConfig))


@dataclass
class TrainConfig(WorldConfig):
    """A whole run: budget, place, and the settings of every part."""

    name: str = word("train")  # of the run; names its folder
    seed: int = number(42, 0, MAX_SEED)  # root of every random stream
    device: str = word("auto", DEVICE)  # auto, cpu, cuda, cuda:<index>
    # K, processes that share out the envs: one per GPU, or per group of cores of a CPU.
    ranks: int = number(1, 1, 65_536, note="at most envs")
    restarts: int = number(0, 0, COUNT, note="0 = the run ends there")  # of all, if one is lost
    run_dir: str = ""  # folder of the run; "" = runs/<name>/<time>
    rounds: int = number(10, 1, COUNT)  # episodes of every env, each followed by one policy update
    steps: int = number(40, 1, 1_000_000)  # env-steps per episode
    # Several tasks in one run, that one policy plays: options of the group `task`, each followed by
    # settings of its own, as "text_small envs=4"; see compose.py.
    tasks: list[str] = field(default_factory=list)
    # Settings of each task, by its name; the settings beside are those of the first.
    worlds: dict[str, WorldConfig] = field(default_factory=dict)
    # Who plays the last rounds too, for the final table; as text a list of several.
    control: str = choice_or_list("wait", ("none", *CONTROLS), part=AGENT)
    # A host of a control trains as long as the grown host beside it: for as many env-steps, on as
    # many images, or at as many training FLOP, over which its learning rates are scheduled.
    control_budget: str = choice("steps", BUDGETS)
    control_rounds: int = number(1, 1, COUNT)  # last ones, that the control plays
    # Rounds between checkpoints.
    checkpoint_every: int = number(5, 0, COUNT, note="0 = only at the end and on a signal")
    checkpoint_keep: int = number(2, 1, COUNT)  # newest checkpoints that stay, beside the best
    track: list[str] = choices((), TRACKERS, least=0)  # trackers, told the numbers of every round
    profile: str = choice("off", ("off", "phases", "torch"))  # phases: shares; torch: a trace
    report: bool = True  # leave report.html at the end, where the extra `report` is installed
    resume: str = ""  # a checkpoint or run folder to go on from; auto = the newest there is
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    effects: EffectsConfig = field(default_factory=EffectsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_ranks()
        self._check_effects()
        self._check_batches()
        kind = nets.HOST_KINDS.get(self.task.host)
        chosen = self.data.name != "auto" or self.data.root != ""
        if kind is not None and kind.data != "auto" and not chosen:
            context = self.task.transformer.context
            self.data = replace(self.data, name=kind.data, context=context)
        self.slots = nets.resolve_slots(self.task, list(self.slots))
        own_host = is_reference(self.task.host)
        if not own_host:  # those of a user's own host, which needs torch, later
            nets.sort_slots(self.task, self.slots)
        allowed = f"another control with task.host={self.task.host}"
        remedy = "The package cannot make a host of your own wider."
        self.require(
            not own_host or "static_large" not in self.controls, "control", allowed, remedy=remedy
        )
        static = self.control_budget == "steps" or set(self.controls) <= set(STATIC_CONTROLS)
        remedy = f"Only {', '.join(STATIC_CONTROLS)} have a length that is known beforehand."
        allowed = f"steps with control={self.control}"
        self.require(static, "control_budget", allowed, remedy=remedy)
        allowed = "0 with governor.enabled=false, which never rolls back"
        watched = self.early_stop.rollbacks == 0 or self.governor.enabled
        self.require(watched, "early_stop.rollbacks", allowed)
        self._check_policy()
        num_modes = len(env_words(self.reward.mode))
        allowed = f"at most envs={self.envs} modes"
        self.require(num_modes <= self.envs, "reward.mode", allowed, remedy="Each needs an env.")
        self._check_tasks()

    def _check_effects(self) -> None:
        """Raise SettingError where actions are to be measured that cannot be."""
        measured = bool(self.effects.ops)
        name = "effects.ops"
        remedy = "Twins are in the process of their source."
        allowed = f"[] with ranks={self.ranks}"
        self.require(not measured or self.ranks == 1, name, allowed, remedy=remedy)
        silent = self.telemetry.level == "off"
        self.require(not (measured and silent), name, "[] with telemetry.level=off")

    @property
    def round_env_steps(self) -> int:
        """Env-steps of all envs in a round in which no episode ends early."""
        return self.envs * self.steps

    @property
    def controls(self) -> tuple[str, ...]:
        """The controls that repeat the last rounds; a policy is no control of itself."""
        return tuple(
            name for name in env_words(self.control) if name not in ("none", self.policy.name)
        )

    @property
    def by_task(self) -> dict[str, "TrainConfig"]:
        """The settings of each task as if it were played alone, by its name; of one these."""
        worlds = {name: vars(world) for name, world in self.worlds.items()}
        alone = {
            name: replace(self, tasks=[], worlds={}, **world) for name, world in worlds.items()
        }
        return alone or {self.task.name: self}

    def for_evaluation(self, cfg: "EvaluateConfig") -> "TrainConfig":
        """These settings, of a task, with amount, place and choice of actions from `cfg`."""
        precision = cfg.compute.precision
        precision = self.compute.precision if precision == "auto" else precision
        return replace(
            self,
            envs=cfg.envs or self.envs,
            rounds=cfg.episodes,
            data=replace(self.data, root=cfg.data_root or self.data.root),
            compute=replace(cfg.compute, precision=precision),
            telemetry=replace(self.telemetry, progress=cfg.progress),
            policy=replace(self.policy, deterministic=cfg.deterministic),
            effects=EffectsConfig(),
        )

    def without_growth(self, task: nets.TaskConfig, slot: str) -> "TrainConfig":
        """The settings of hosts of `task` that do not grow: with a slot alone, as slots take
        memory; for one episode nothing is compiled and no graphs are tried. Users' blueprints and
        rewards, which may not fit width or slot, are left out.
        """
        changes: dict = {}
        packaged = [name for name in task.blueprints if not is_reference(name)]
        if len(packaged) < len(task.blueprints) or any(map(is_reference, self.reward.modes)):
            task = replace(task, blueprints=packaged or [UNIVERSAL_BLUEPRINT])
            changes = {"reward": env.RewardConfig(), "policy": replace(self.policy, name="wait")}
        compute = replace(self.compute, compile="off", cuda_graphs="off")
        effects = EffectsConfig()
        return replace(self, task=task, slots=[slot], compute=compute, effects=effects, **changes)

    def _check_tasks(self) -> None:
        if not self.worlds:
            self.require(
                not self.tasks, "tasks", "left out here", remedy="compose_settings() takes them."
            )
            return
        for name, world in self.worlds.items():
            allowed = f"{world.task.name}, the name of its task"
            check(name == world.task.name, "worlds", name, allowed=allowed)
        self.require(self.ranks == 1, "ranks", "1 with several tasks", remedy="Or play one alone.")
        parts = [list(filter(is_reference, cfg.task.blueprints)) for cfg in self.by_task.values()]
        allowed = "so that all tasks offer the same blueprints of your own"
        alike = self.policy.name != "ppo" or parts.count(parts[0]) == len(parts)
        self.require(alike, "tasks", allowed, remedy="The policy has a row for each of them.")

    def _check_ranks(self) -> None:
        single = self.ranks == 1
        remedy = "Every rank has an env at least."
        self.require(self.ranks <= self.envs, "ranks", f"at most envs={self.envs}", remedy=remedy)
        several_devices = single or not self.device.startswith("cuda:")
        allowed = f"auto, cpu or cuda with ranks={self.ranks}"
        self.require(several_devices, "device", allowed, remedy="Rank i takes the i-th GPU.")
        remedy = "A single process is started again with resume=auto."
        self.require(not single or self.restarts == 0, "restarts", "0 with ranks=1", remedy=remedy)
        remedy = "It looks at the envs of one process alone."
        for setting, value, needed in (
            ("profile", self.profile, "off"),
            ("telemetry.console", self.telemetry.console, "bar"),
        ):
            allowed = f"{needed} with ranks={self.ranks}"
            self.require(single or value == needed, setting, allowed, remedy=remedy)

    def _check_batches(self) -> None:
        images = self.batch_size * self.accumulate  # of an optimiser step
        over = self.train_samples % images
        below = self.train_samples - over
        nearest = " or ".join(str(count) for count in (below, below + images) if count)
        times = f" times accumulate={self.accumulate}" if self.accumulate > 1 else ""
        allowed = f"a multiple of batch_size={self.batch_size}{times}"
        fits = not over or self.data.split
        self.require(fits, "train_samples", allowed, remedy=f"Nearest: {nearest}.")

    def _check_policy(self) -> None:
        policy = self.policy
        allowed = f"{SCRATCH}, the name of a policy that ships, a run folder or a file"
        self.require(bool(policy.init), "policy.init", allowed)
        sizes = dict(zip(HEAD_NAMES, head_sizes(len(self.slots)), strict=True))
        sizes["blueprint"] = len(self.task.blueprints)
        for head, floor in policy.ppo.probability_floor.items():
            setting = f"policy.ppo.probability_floor.{head}"
            remedy = f"All of the head's {sizes[head]} choices may be legal at once."
            check(
                floor * sizes[head] <= 1,
                setting,
                floor,
                allowed=f"at most 1/{sizes[head]}",
                remedy=remedy,
            )
        taught = policy.name == "ppo" and policy.imitation.rounds > 0
        players = (policy.imitation.teacher if taught else policy.name, *self.controls)
        allowed = "one of task.blueprints: " + ", ".join(self.task.blueprints)
        for setting, player, names in (
            ("schedule.blueprint", "schedule", [policy.schedule.blueprint]),
            ("heuristic.blueprint_rotation", "heuristic", policy.heuristic.blueprint_rotation),
        ):
            for name in names if player in players else ():
                check(name in self.task.blueprints, f"policy.{setting}", name, allowed=allowed)


@dataclass
class EvaluateConfig(Settings):
    """An evaluation: which policies play how much. The world is that of the checkpoint's run."""

    checkpoint: str = ""  # a checkpoint, or a run folder, whose newest is taken
    # Ppo: the learned one.
    policies: list[str] = choices(("ppo", "heuristic", "random", "wait"), POLICIES, part=AGENT)
    episodes: int = number(4, 1, 1_000_000)  # of every env and policy
    envs: int = number(0, 0, MAX_ENVS, note="0 = as many as in training")  # N
    seed: int = number(0, 0, MAX_SEED)  # of hosts, orders and draws that training never meets
    deterministic: bool = True  # the learned policy takes its likeliest choice instead of sampling
    confidence: float = number(0.95, 0, 1, ends="()")  # of the intervals
    name: str = word("evaluation")  # names its folder
    run_dir: str = ""  # folder of the results; "" = runs/<name>/<time>
    device: str = word("auto", DEVICE)  # as in training
    data_root: str = ""  # where CIFAR-10 or the .npz is here; "" = where it was in training
    progress: str = choice("auto", PROGRESS_STYLES)  # as telemetry.progress
    compute: ComputeConfig = field(default_factory=ComputeConfig)

    def __post_init__(self) -> None:
        is_path = self.checkpoint not in ("", "auto")
        self.require(is_path, "checkpoint", "a checkpoint or a run folder")
        super().__post_init__()


def register_schema() -> None:
    """Let Hydra check every composed key and type; train.yaml and evaluate.yaml build on these.
    OmegaConf learns of ${share:20}, a share of `steps`.
    """
    register_resolver("share", share, replace=True)
    store = ConfigStore.instance()
    for name, kind in (("train_schema", TrainConfig), ("evaluate_schema", EvaluateConfig)):
        file = f"{name}.yaml"  # by store.store the node would be made anew each time
        store.repo[file] = ConfigNode(file, _schema(kind), group=None, package=None, provider=None)
    # Hydra copies the whole store where it composes, and never changes a copy.
    vars(store)["__deepcopy__"] = lambda memo: store


def share(percent: float, *, _root_: DictConfig) -> int:
    """Env-steps, one at least, that are nearest to so many percent of those of an episode."""
    return max(1, round(percent / 100 * _root_.steps))


@cache
def _schema(kind: type) -> DictConfig:
    """The defaults and types of the settings; whoever takes it merges or changes a copy."""
    return OmegaConf.structured(kind)


def settings_from(composed: DictConfig) -> TrainConfig:
    """The checked settings of a composed configuration; raises UserError."""
    for key in flat_settings(cast(Mapping, OmegaConf.to_container(composed))):
        check_key(key, TrainConfig)  # '+key=value' and a file bring it past Hydra's own check
    return _check_composed(composed, TrainConfig, "train_schema")


def settings_from_mapping(settings: Mapping[str, object]) -> TrainConfig:
    """The checked settings that a checkpoint keeps as plain values; of earlier versions too."""
    with reading("checkpoint", UserError, "of a run with settings of this program"):
        today = drop_gone(join_split(settings), "the run")
        for name, value in flat_settings(today).items():
            allowed = "a value: what stands on record looks nothing up, as ${...} does"
            check("${" not in str(value), name, value, allowed=allowed)
        merged = OmegaConf.merge(_schema(TrainConfig), today)
    return settings_from(cast(DictConfig, merged))


def evaluation_from(composed: DictConfig) -> EvaluateConfig:
    """The checked settings of a composed evaluation; raises UserError."""
    return _check_composed(composed, EvaluateConfig, "evaluate_schema")


def _check_composed(composed: DictConfig, kind: type[Kind], schema: str) -> Kind:
    """The dataclass of a composed configuration, its checks passed."""
    try:
        settings = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {single_line(error)}") from error
    if not isinstance(settings, kind):
        reason = f"the primary config must list {schema} first in its defaults"
        raise UserError(f"configuration: {reason}")
    return settings


def settings_yaml(settings: TrainConfig) -> str:
    """The settings as text for config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.structured(settings))


def settings_from_yaml(text: str) -> TrainConfig:
    """The settings that `settings_yaml` gave."""
    return settings_from_mapping(plain_settings(text))


def plain_settings(text: str) -> dict[str, object]:
    """Nested settings as they stand in a config.yaml, which nothing has checked."""
    return dict(cast(Mapping, OmegaConf.to_container(OmegaConf.create(text))))


def flat_settings(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as one level: {"policy.ppo.lr": 3e-4, ...}."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
