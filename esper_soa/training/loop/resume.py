"""The rules for going on from a checkpoint: what must be the same, and what is brought back.

No random state is kept: every random number is a hash of seed, round, env and env-step, so the
counters are enough to continue bit for bit.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.ppo import Learner
from esper_soa.config.gone import drop_gone
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.nets.data.batches import BatchSource
from esper_soa.system.errors import UserError, one_line, reading
from esper_soa.system.files import LOGGER, reason_of
from esper_soa.system.json_lines import keep_rounds
from esper_soa.system.plain_files import read_text, remove
from esper_soa.system.versions import package_versions
from esper_soa.training.files.checkpoint import CheckpointError, mismatch
from esper_soa.training.files.run_folder import RunFolder, rounds_of
from esper_soa.training.files.saved_run import SavedRun, SavedTask
from esper_soa.training.loop.recorder import Recorder

# Settings that may be another in the run that goes on; a name with a dot at the end stands for all
# settings under it. data.name and data.root may, as the images themselves are compared.
MAY_CHANGE = (
    *("name", "device", "run_dir", "rounds", "checkpoint_every", "checkpoint_keep"),
    *("control", "control_budget", "profile", "report", "resume", "track", "ranks", "restarts"),
    *("compute.workers", "compute.threads", "compute.env_chunk", "compute.compile"),
    *("compute.engine", "compute.cuda_graphs", "telemetry.", "data.name", "data.root"),
)
ABSENT_SETTING = "(absent)"


def restore_learner(learner: Learner, checkpoint_run: SavedRun, path: Path) -> None:
    """Give the learner its state back, all or nothing; CheckpointError where it does not fit."""
    label = f" {one_line(path)}: the learner does not fit this run"
    _restore(learner, checkpoint_run.learner, "learner", label=label)


def restore_policy(policy: RecurrentPolicy, checkpoint_run: SavedRun) -> None:
    """Give the policy its weights back, all or nothing; CheckpointError where they do not fit."""
    weights = (checkpoint_run.learner or {}).get("policy")
    _restore(policy, weights, "policy", label=": the policy does not fit its own settings")


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
        value_before = before.get(name, defaults.get(name, ABSENT_SETTING))
        value_after = after.get(name, ABSENT_SETTING)
        if value_before != value_after:
            changed[one_line(name)] = f"{one_line(value_before)} -> {one_line(value_after)}"
    return changed


def may_change(name: str) -> bool:
    """Whether a resumed run may have another value for the setting `name`, of any task."""
    name = re.sub(r"^worlds\.[^.]+\.", "", name)
    return any(name.startswith(free) if free.endswith(".") else name == free for free in MAY_CHANGE)


def check_settings(checkpoint_run: SavedRun, cfg: TrainConfig) -> list[str]:
    """The harmless changes; raises UserError, which lists them, for changes that matter."""
    with reading("resume: the checkpoint", UserError, "of a run with settings of this program"):
        changed = changes(drop_gone(checkpoint_run.settings, "resume: the checkpoint"), asdict(cfg))
    relevant = [f"  {name}: {change}\n" for name, change in changed.items() if not may_change(name)]
    if relevant:
        free = ", ".join(name + "*" if name.endswith(".") else name for name in MAY_CHANGE)
        problem = "resume: these settings are not those of the checkpoint:\n"
        remedy = "Repeat the overrides of the run; overrides.txt in its folder has them."
        raise UserError(f"{problem}{''.join(relevant)}  {remedy} These may change: {free}.")
    done = checkpoint_run.rounds_done
    if cfg.rounds < done:
        allowed = f"at least {done}, which the checkpoint has done already"
        raise UserError(f"rounds={cfg.rounds}: must be {allowed}")
    of_this_call = ("resume", "run_dir")
    return [f"{name}: {change}" for name, change in changed.items() if name not in of_this_call]


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
        engine_before = json.loads(read_text(folder.versions))["kernels"]["engine"]
    except (OSError, ValueError, KeyError, TypeError):
        return texts  # nothing says which it was
    if engine_before != engine:
        earlier = one_line(engine_before)
        remedy = f"results differ in rounding (compute.engine={earlier} asks for it again)"
        texts.append(f"engine: {earlier} -> {engine}: {remedy}")
    return texts


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        problem = f"cannot be written ({reason_of(error)}). Make room there"
        raise UserError(f"resume: {folder.path} {problem}") from error


def drop_checkpoints(folder: RunFolder, rounds: int) -> None:
    """Drop the checkpoints of more than `rounds` rounds; UserError where they cannot be."""
    with _writing(folder):
        for path in folder.checkpoints():
            if rounds_of(path) > rounds:
                remove(path)
                LOGGER.warning("resume   %s is dropped: this run makes its rounds anew", path.name)


def cut_back(folder: RunFolder, rounds: int, recorder: Recorder) -> None:
    """Bring metrics.jsonl, episodes.jsonl and the tables back to `rounds` rounds; UserError."""
    with _writing(folder):
        recorder.truncate(rounds)
        keep_rounds(folder.episodes, rounds)
        if keep_rounds(folder.metrics, rounds) < rounds:
            LOGGER.warning("resume   metrics.jsonl lacks rounds that the checkpoint has done")
