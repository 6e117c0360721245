"""What the rounds of a run add up to, what else its checkpoints hold beside the learner, and the
rules for going on from one.

No random state is kept: every random number is a hash of seed, round, env and env-step, so the
counters are enough to continue bit for bit.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.config.errors import UserError, one_line
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.env.outcome import hypervolume, trade_offs
from esper_soa.env.topology import Topology
from esper_soa.nets.data.batches import BatchSource
from esper_soa.runtime.files import LOGGER, reason_of
from esper_soa.runtime.json_lines import keep_rounds
from esper_soa.runtime.versions import package_versions
from esper_soa.state import STATE_FLOAT
from esper_soa.training.anomaly import WatchState
from esper_soa.training.callbacks import Recorder
from esper_soa.training.checkpoint import CheckpointError, load_checkpoint, mismatch, type_error
from esper_soa.training.final_table import Pareto
from esper_soa.training.metrics import RoundResult
from esper_soa.training.run_folder import RunFolder, rounds_of

# What may be another value in the run that goes on; a name with a dot at the end stands for all
# settings under it. data.name and data.root may, as the images themselves are compared.
MAY_CHANGE = (
    *("name", "device", "run_dir", "rounds", "control", "checkpoint_every", "checkpoint_keep"),
    *("profile", "report", "resume", "track", "ranks", "restarts"),
    *("compute.workers", "compute.threads", "compute.env_chunk", "compute.compile"),
    *("compute.engine", "compute.cuda_graphs", "telemetry.", "data.name", "data.root"),
)
ABSENT = "(absent)"


@dataclass
class FinalHosts:
    """The hosts at the end of a round, for its control and the final table."""

    accuracies: list[float]  # validation accuracy per env, percent
    parameters: list[float]
    train_flop: list[float]
    blueprint: list[list[int]]  # per env and slot, as in env/topology.py, and so the next two
    blend: list[list[int]]
    alpha: list[list[float]]
    test_accuracies: list[float] = field(default_factory=list)  # percent; none where not measured
    test_losses: list[float] = field(default_factory=list)  # nats; likewise
    settings: dict[str, list[float | str]] = field(default_factory=dict)  # as of RoundResult

    @classmethod
    def of(cls, result: RoundResult) -> "FinalHosts":
        blueprint, blend, alpha = (part.tolist() for part in result.topology)
        sizes = result.parameters, result.train_flop
        tested = list(result.test_accuracies), list(result.test_losses)
        settings = {name: list(values) for name, values in result.settings.items()}
        return cls(result.accuracies, *sizes, blueprint, blend, alpha, *tested, settings)

    @property
    def topology(self) -> Topology:
        alpha = torch.tensor(self.alpha, dtype=STATE_FLOAT)
        return Topology(torch.tensor(self.blueprint), torch.tensor(self.blend), alpha)


@dataclass
class RunTotals:
    """Sums over the rounds of a task in a run, and its last rounds."""

    rounds_done: int = 0
    seconds: float = 0.0  # of collecting and updating
    alpha_rows: float = 0.0  # sum over rounds of the mean number validated per env-step
    seeds: dict[str, int] = field(default_factory=dict)  # events by name
    # Pareto front: accuracy, stability, parameter ratio.
    front: list[list[float]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # per env, of the last round
    # The last rounds, control_rounds of them, oldest first.
    recent: list[FinalHosts] = field(default_factory=list)
    # Env-steps that were not simulated, as the episodes of their envs had ended early.
    cut_off: int = 0

    def add(self, result: RoundResult, seconds: float, cfg: TrainConfig) -> None:
        """Add a round; seconds: of collecting and updating."""
        self.rounds_done += 1
        self.cut_off += cfg.envs * cfg.steps - result.env_steps
        self.seconds += seconds
        self.alpha_rows += float(result.record["alpha_rows"])  # type: ignore[arg-type]
        self.seeds = {name: self.seeds.get(name, 0) + count for name, count in result.seeds.items()}
        points = torch.tensor(self.front + result.points, dtype=STATE_FLOAT)
        self.front = trade_offs(points).tolist()
        self.rewards = result.rewards
        self.recent = [*self.recent, FinalHosts.of(result)][-cfg.control_rounds :]

    def env_steps(self, cfg: TrainConfig) -> int:
        """Number of env-steps so far, of all envs."""
        return self.rounds_done * cfg.envs * cfg.steps - self.cut_off

    def pareto(self) -> Pareto:
        """The trade-offs that the run has found so far."""
        front = torch.tensor(self.front, dtype=STATE_FLOAT).view(-1, 3)
        return Pareto(len(front), float(hypervolume(front[:, 0], front[:, 2])))


@dataclass
class SavedTask:
    """What a checkpoint has of a task."""

    progress: RunTotals
    data: dict[str, str]  # name, source, identity


@dataclass
class SavedRun:
    """The content of a checkpoint of ours."""

    tasks: dict[str, SavedTask]  # by name, in the order in which they are played
    settings: dict
    versions: dict[str, str | None]
    watch: WatchState
    # Percent at the end of the best round: mean over tasks of their means over envs.
    best_accuracy: float
    learner: dict | None

    @property
    def rounds_done(self) -> int:
        """Rounds done, of all tasks."""
        return next(iter(self.tasks.values())).progress.rounds_done

    def task(self, name: str) -> SavedTask:
        """The part of a task; raises CheckpointError where there is none."""
        if name not in self.tasks:
            known = one_line(", ".join(self.tasks))
            raise CheckpointError(f"the checkpoint has no task {one_line(name)}, but {known}")
        return self.tasks[name]


def read_run(path: Path, device: torch.device) -> SavedRun:
    """The run that was saved to `path`; raises CheckpointError for everything else."""
    return parse_run(path, load_checkpoint(path, device))


def parse_run(path: Path, content: Mapping[str, object]) -> SavedRun:
    """The run of a checkpoint's content; raises CheckpointError where it is of none."""
    parts: dict = dict(content)
    fault = type_error(parts, SavedRun, "the record")
    fault = fault or ("" if parts["tasks"] else "the record.tasks is empty")
    if fault:
        reason = f"is not of a training run ({one_line(fault)})"
        raise CheckpointError(f"checkpoint {one_line(path)}: {reason}")
    tasks = {}
    for name, task in parts["tasks"].items():
        recent = [FinalHosts(**hosts) for hosts in task["progress"]["recent"]]
        tasks[name] = SavedTask(RunTotals(**task["progress"] | {"recent": recent}), task["data"])
    return SavedRun(**parts | {"tasks": tasks, "watch": WatchState(**parts["watch"])})


def restore_learner(learner: Learner, checkpoint_run: SavedRun, path: Path) -> None:
    """Give the learner its state back, all or nothing; CheckpointError where it does not fit."""
    label = f" {one_line(path)}: the learner does not fit this run"
    _restore(learner, checkpoint_run.learner, "learner", label)


def restore_policy(policy: RecurrentPolicy, checkpoint_run: SavedRun) -> None:
    """Give the policy its weights back, all or nothing; CheckpointError where they do not fit."""
    weights = (checkpoint_run.learner or {}).get("policy")
    _restore(policy, weights, "policy", ": the policy does not fit its own settings")


def _restore(part: Learner | RecurrentPolicy, state: object, name: str, label: str) -> None:
    fault = mismatch(state, part.state_dict(), name)
    if fault:
        raise CheckpointError(f"checkpoint{label} ({one_line(fault)})")
    part.load_state_dict(cast(dict, state))


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, str]:
    """Settings that differ, as "old -> new" by name; one that was not there had today's default."""
    before = flat_settings(old)
    after = flat_settings(new)
    defaults = flat_settings(asdict(TrainConfig()))
    changed = {}
    for name in after | before:
        value_before = before.get(name, defaults.get(name, ABSENT))
        value_after = after.get(name, ABSENT)
        if value_before != value_after:
            changed[one_line(name)] = f"{one_line(value_before)} -> {one_line(value_after)}"
    return changed


def may_change(name: str) -> bool:
    """Whether a resumed run may have another value for the setting `name`, of any task."""
    name = re.sub(r"^worlds\.[^.]+\.", "", name)
    return any(name.startswith(free) if free.endswith(".") else name == free for free in MAY_CHANGE)


def check_settings(checkpoint_run: SavedRun, cfg: TrainConfig) -> list[str]:
    """The harmless changes; raises UserError, which lists them, for changes that matter."""
    changed = changes(checkpoint_run.settings, asdict(cfg))
    relevant = [f"  {name}: {change}\n" for name, change in changed.items() if not may_change(name)]
    if relevant:
        free = ", ".join(name + "*" if name.endswith(".") else name for name in MAY_CHANGE)
        problem = "resume: these settings are not those of the checkpoint:\n"
        raise UserError(f"{problem}{''.join(relevant)}  These may change: {free}.")
    done = checkpoint_run.rounds_done
    if cfg.rounds < done:
        allowed = f"at least {done}, which the checkpoint has done already"
        raise UserError(f"rounds={cfg.rounds}: must be {allowed}")
    own = ("resume", "run_dir")
    return [f"{name}: {change}" for name, change in changed.items() if name not in own]


def check_data(saved: SavedTask, data: BatchSource) -> None:
    """Raise UserError where the samples are not those of the checkpoint."""
    if saved.data["identity"] != data.identity:
        made = f"It was made on {one_line(saved.data['source'])} This is {data.source}"
        raise UserError(f"resume: the {data.spec.name} are not those of the checkpoint. {made}")


def version_changes(checkpoint_run: SavedRun, folder: RunFolder, engine: str) -> list[str]:
    """Packages, and the engine, that are others than those of the run so far, and what of it."""
    before = checkpoint_run.versions
    texts = [
        f"{name}: {one_line(before.get(name))} -> {version}: results may differ in rounding"
        for name, version in package_versions().items()
        if before.get(name) != version
    ]
    try:
        engine_before = json.loads(folder.versions.read_text(encoding="utf-8"))["kernels"]["engine"]
    except (OSError, ValueError, KeyError, TypeError):
        return texts  # nothing says which it was
    if engine_before != engine:
        earlier = one_line(engine_before)
        remedy = f"results differ in rounding (compute.engine={earlier} asks for it again)"
        texts.append(f"engine: {earlier} -> {engine}: {remedy}")
    return texts


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """Raise UserError where the folder cannot be written in the context."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({reason_of(error)}). Make room there"
        raise UserError(f"resume: {folder.path} {problem}") from error


def drop_checkpoints(folder: RunFolder, rounds: int) -> None:
    """Drop the checkpoints of more than `rounds` rounds; UserError where they cannot be."""
    with _writing(folder):
        for path in folder.checkpoints():
            if rounds_of(path) > rounds:
                path.unlink(missing_ok=True)
                LOGGER.warning("resume   %s is dropped: this run makes its rounds anew", path.name)


def cut_back(folder: RunFolder, rounds: int, recorder: Recorder) -> None:
    """Bring metrics.jsonl, episodes.jsonl and the tables back to `rounds` rounds; UserError."""
    with _writing(folder):
        recorder.truncate(rounds)
        keep_rounds(folder.episodes, rounds)
        if keep_rounds(folder.metrics, rounds) < rounds:
            LOGGER.warning("resume   metrics.jsonl lacks rounds that the checkpoint has done")
