"""Where a run with given settings takes place and begins, and whether it has ended; and the runs,
and the policies to start from, that a user names.

A run folder is one whose config.yaml has rounds; a folder that holds some, as a sweep does, stands
for all of them. Which rank of a run a process is, torchrun or the launcher of the package tells it
in its environment. Needs no torch.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from esper_soa.config.agent import SCRATCH
from esper_soa.config.errors import UserError, one_line
from esper_soa.config.paths import user_path
from esper_soa.config.settings import TrainConfig, flat_settings
from esper_soa.training.run_folder import (
    RUNS,
    RunFolder,
    dated_folders,
    find_checkpoint,
    newest_whole,
    open_run_folder,
    writable,
)

POLICIES = Path(__file__).resolve().parents[1] / "agent" / "policies"  # those that ship
SUFFIX = ".policy"  # beside each lies its card, NAME.md
DEPTH = 3  # folders below the given one in which runs are looked for: runs/<name>/<sweep>/<job>


class RunStart(NamedTuple):
    """Where a run begins: afresh, or after a checkpoint in the folder that holds it."""

    folder: RunFolder
    checkpoint: Path | None


class Place(NamedTuple):
    """A process among those that torch's elastic launcher has started together."""

    rank: int
    processes: int
    local_rank: int  # on its machine
    local_processes: int
    restarts: int  # times that all were started again
    run_id: str

    @property
    def first(self) -> bool:
        """Whether it is the one that writes."""
        return self.rank == 0


def place() -> Place | None:
    """The place of this process; None for one that no launcher has started."""
    given = os.environ
    if "TORCHELASTIC_RUN_ID" not in given or "RANK" not in given:
        return None
    return Place(
        rank=int(given["RANK"]),
        processes=int(given["WORLD_SIZE"]),
        local_rank=int(given["LOCAL_RANK"]),
        local_processes=int(given["LOCAL_WORLD_SIZE"]),
        restarts=int(given["TORCHELASTIC_RESTART_COUNT"]),
        run_id=given["TORCHELASTIC_RUN_ID"],
    )


def folder_for(settings: TrainConfig, asked: str) -> RunFolder:
    """The folder of a run, made where new: `asked`, or its name and the time; or what it resumes.

    Where torchrun has started the ranks of the run, the id of its launch stands for the time.
    Raises UserError where there can be none, or a policy to start from leads nowhere.
    """
    if settings.resume:
        return resume_start(settings.resume, asked, settings.name).folder
    if settings.policy.name == "ppo" and settings.policy.init != SCRATCH:
        find_policy(settings.policy.init)
    here = place()
    if here is None:
        return open_run_folder(asked, settings.name)
    # torchrun tells only the machine of a rank that was lost that it starts all again, so a folder
    # that there is, is that of this run, for all ranks, on every machine, and at every start
    path = user_path("run_dir", asked) if asked else RUNS / settings.name / here.run_id
    return writable(path, "run_dir")


def find_start(settings: TrainConfig, folder: RunFolder) -> RunStart:
    """Where the run in `folder` begins; asked for once nobody else can write there.

    Where a launcher has started its ranks, maybe again, at the newest checkpoint that there is.
    """
    here = place()
    restarted = here is not None and (here.restarts or not settings.resume)
    resume = "auto" if restarted else settings.resume
    if resume:
        return resume_start(resume, str(folder.path), settings.name)
    return RunStart(open_run_folder(str(folder.path), settings.name), None)


def resume_start(resume: str, run_dir: str, name: str) -> RunStart:
    """Where to go on: `resume` is a checkpoint, a run folder, or auto.

    auto takes the newest checkpoint in `run_dir`, or without one in the newest folder of
    runs/`name` that has any; where there is none it starts afresh. A damaged checkpoint is passed
    over (see `passed_over`). Raises UserError where there is nothing to resume from.
    """
    given = user_path("run_dir", run_dir)
    if resume != "auto":
        path = find_checkpoint(resume, "resume")
        if run_dir and given.resolve() != path.parent:
            raise UserError(
                f"run_dir={one_line(run_dir)}: a resumed run goes on in the folder of its "
                f"checkpoint, {path.parent}. Leave run_dir out."
            )
        return RunStart(writable(path.parent, "resume"), path)
    for folder in [given] if run_dir else dated_folders(RUNS / name):
        found = RunFolder(folder).checkpoints()
        if found:
            return RunStart(writable(folder, "run_dir"), newest_whole(found, "resume=auto"))
    ended = any((given / result).exists() for result in ("summary.json", "evaluation.json"))
    if run_dir and not ended:  # left by a run that ended before its first checkpoint
        return RunStart(writable(given, "run_dir"), None)
    return RunStart(open_run_folder(run_dir, name), None)


def finished_accuracy(folder: RunFolder, settings: TrainConfig) -> float | None:
    """The final accuracy in `folder`, if the run was of these settings and has ended."""
    if not folder.summary.is_file() or not goes_on_in(folder, settings):
        return None
    try:
        accuracy = json.loads(folder.summary.read_text(encoding="utf-8"))["grown"]["accuracy"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return accuracy if isinstance(accuracy, float) else None


def goes_on_in(folder: RunFolder, settings: TrainConfig) -> bool:
    """Whether `settings` ask to go on with the run in `folder`, and it was of the same."""
    if settings.resume != "auto":
        return False
    there = read_settings(folder.config)
    own = {"resume": "", "run_dir": ""}
    return bool(there) and there | own == flat_settings(asdict(settings)) | own


def shipped() -> list[str]:
    """Names of the policies that ship, in order."""
    return sorted(path.stem for path in POLICIES.glob(f"*{SUFFIX}"))


def find_policy(init: str) -> Path:
    """The file of the policy `init`: one that ships, a run folder (its newest checkpoint), a file.

    A name goes before a folder of that name. Raises UserError, which lists the names, for none.
    """
    names = shipped()
    if init in names:
        return POLICIES / f"{init}{SUFFIX}"
    if not user_path("policy.init", init).exists():
        raise UserError(
            f"policy.init={one_line(init)}: there is no such policy, run folder or checkpoint. "
            f"Policies that ship: {', '.join(names) or 'none yet'}"
        )
    return find_checkpoint(init, "policy.init")


def find_run_folders(given: Sequence[str | Path]) -> dict[str, Path]:
    """The run folders in `given` by labels: the ends of their paths, the shortest that differ.

    A run that is found twice counts once. Raises UserError where a folder holds none.
    """
    paths: list[Path] = []
    for one in given:
        place = user_path("RUN", str(one))
        found = list(_run_folders(place, DEPTH))
        if not found:
            why = "holds no run: there is no config.yaml of a run in it or below it"
            raise UserError(f"RUN={one_line(one)}: {why}")
        paths += [path for path in found if path not in paths]
    return dict(zip(_labels(paths), paths, strict=True))


def read_settings(path: Path) -> dict[str, object]:
    """The settings in config.yaml by dotted names; none where it is not there or cannot be read."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return {}
    return flat_settings(cast(dict, found)) if isinstance(found, dict) else {}


def _run_folders(place: Path, depth: int) -> Iterator[Path]:
    """Run folders in `place` and below, in the order of their names, numbers by their value."""
    if "rounds" in read_settings(RunFolder(place).config):
        yield place.resolve()
    elif depth and place.is_dir():
        below = sorted((one for one in place.iterdir() if one.is_dir()), key=_by_number)
        for one in below:
            yield from _run_folders(one, depth - 1)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else -1, path.name)


def _labels(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        ends = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]
