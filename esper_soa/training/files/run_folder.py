"""The folder of a run: how it is made and found, what lies in it, and the two records that make a
run repeatable: config.yaml and versions.json. Needs no torch.
"""

import errno
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from yaml import AliasEvent, parse

from esper_soa.config.paths import user_path
from esper_soa.config.settings import plain_settings
from esper_soa.system.errors import UserError, one_line, reading
from esper_soa.system.files import reason_of, write_text
from esper_soa.system.json_lines import Json, write_json
from esper_soa.system.plain_files import (
    FOLDER,
    OTHER,
    NotPlainError,
    find_not_plain,
    list_folder,
    open_plain,
    refusal,
    remove,
)
from esper_soa.system.versions import package_versions
from esper_soa.training.files.checksum import CheckpointError, find_damage

RESULT_FILES = ("metrics.jsonl", "episodes.jsonl", "summary.json", "evaluation.json", "best.pt")
NUMBERED_FILE = re.compile(r"(?:checkpoint_(\d{6,18})\.pt|(?:best|hosts)_(\d{6,18})\.safetensors)")
TIME_STAMP = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:_(\d+))?")
# Names in the folder of a run or sweep that are no field of RunFolder, and to which some library
# writes; in the folders of two of them the library itself makes links.
JOURNAL = "mlflow.db-journal"
LIBRARY_NAMES = (
    "mlflow.db",
    JOURNAL,
    "mlflow.db-wal",
    "mlflow.db-shm",
    "multirun.yaml",
    "study.log",
    "tensorboard",
    "trace.json",
    "trace.json.tmp",
)
LINKING_NAMES = ("wandb", ".submitit")
# The end of a journal of SQLite that names a file, which SQLite deletes when it opens the database:
# https://sqlite.org/fileformat.html. A database of a single file has no such journal.
NAMES_FILE = bytes.fromhex("d9d505f920a163d7")
# Bytes of a config.yaml: three tasks have 20,000. What YAML makes of them takes 1000 times as much.
MAX_SETTINGS = 1 << 17
RUNS_FOLDER = Path("runs")  # where folders are made for which no place is given
MADE_HERE = set[Path]()  # folders that this process has made for runs


@dataclass
class RunFolder:
    """Paths of everything that a run leaves behind."""

    path: Path

    def __post_init__(self) -> None:
        self.config = self.path / "config.yaml"  # the resolved settings
        self.overrides = self.path / "overrides.txt"  # words of the command line, one a line
        self.versions = self.path / "versions.json"  # software, machine, device and data
        self.metrics = self.path / "metrics.jsonl"  # a line per policy update
        self.episodes = self.path / "episodes.jsonl"  # a line per episode of an env
        self.summary = self.path / "summary.json"  # the final table
        self.answers = self.path / "test_answers.npz"  # of hosts of the last rounds, by test sample
        self.evaluation = self.path / "evaluation.json"  # result of an evaluation
        self.best = self.path / "best.pt"  # the policy that played the best round so far
        self.networks = self.path / "networks"  # the folder of grown networks
        self.tables = self.path / "telemetry"  # the folder of recorded env-steps
        self.report = self.path / "report.html"  # the page that shows the run
        self.log = self.path / "log.txt"  # lines of the console, with times
        self.lock = self.path / ".lock"  # the claim of a process that writes
        self.hydra = self.path / ".hydra"  # the folder of Hydra's records, as its tools expect them
        self.trackers = self.path / "trackers.json"  # what each tracker has
        self.evaluation_table = (
            self.path / "evaluation.txt"
        )  # the table of an evaluation, as on the console
        self.sweep_table = self.path / "sweep.json"  # the table of a sweep's jobs
        self.jobs = self.path / ".jobs"  # the folder of the records of a sweep's jobs

    def network(self, kind: str, number: int) -> Path:
        """The best host so far, or all hosts (`kind` best, hosts), of round `number`, from 1."""
        return self.networks / f"{kind}_{number:06d}.safetensors"

    def network_files(self, kind: str) -> list[Path]:
        """The files of networks of a kind, oldest first."""
        return _numbered(list_folder(self.networks), kind)

    def checkpoint(self, rounds: int) -> Path:
        """The checkpoint after `rounds` rounds."""
        return self.path / f"checkpoint_{rounds:06d}.pt"

    def checkpoints(self) -> list[Path]:
        """The numbered checkpoints, oldest first."""
        return _numbered(list_folder(self.path), "checkpoint")

    @property
    def not_plain(self) -> list[Path]:
        """Links, pipes and devices among the files and folders that are written here."""
        known = {path.name for path in vars(self).values() if path != self.path}
        known |= {*LIBRARY_NAMES, *LINKING_NAMES}
        entries = list_folder(self.path)
        ours = [path for path in entries if path.name in known or rounds_of(path) >= 0]
        outer = [path for path in ours if entries[path] == OTHER]
        for folder in (path for path in ours if entries[path] == FOLDER):
            if folder.name in LINKING_NAMES:
                outer += _links_out(folder)
            else:
                outer += find_not_plain([folder])
        return outer

    def check_plain(self) -> None:
        """Raise NotPlainError for the first of `not_plain`, a file with a second name that is
        written in place, and a journal that would delete another file.
        """
        in_place = [self.metrics, self.episodes, self.log, *map(self.path.joinpath, LIBRARY_NAMES)]
        hard_links = (path for path in in_place if path.is_file() and path.stat().st_nlink > 1)
        for path in [*self.not_plain, *hard_links][:1]:
            raise refusal(path, path.lstat())
        _check_journal(self.path / JOURNAL)


def read_config(path: Path, most: int = MAX_SETTINGS) -> dict[str, object]:
    """The nested settings in a config.yaml of at most `most` bytes; raises UserError."""
    with reading(path, UserError, "settings of a run"):
        with os.fdopen(open_plain(path), "rb") as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise ValueError(f"of {most:,} bytes at most")
        # We write no aliases, a few lines of which can stand for more than fits into memory.
        if b"*" in text and any(isinstance(event, AliasEvent) for event in parse(text)):
            raise ValueError("without aliases")
        return plain_settings(text.decode())


def _links_out(folder: Path) -> list[Path]:
    """Links of a library's folder that lead out of it, pipes and devices there; not those of ended
    runs in folders below, which wandb leaves, with links to its cache, and opens no more.
    """
    odd = [path for path, kind in list_folder(folder).items() if kind == OTHER]
    place = folder.resolve()
    return [
        path
        for path in odd
        if not (path.is_symlink() and Path(os.path.realpath(path)).is_relative_to(place))
    ]


def _check_journal(path: Path) -> None:
    """Raise NotPlainError for a journal of SQLite that would delete another file."""
    with suppress(FileNotFoundError), os.fdopen(open_plain(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(NAMES_FILE)))
        if file.read() == NAMES_FILE:
            reason = "a journal by which another file would be deleted. Delete it"
            raise NotPlainError(errno.EPERM, reason, str(path))


def rounds_of(path: Path) -> int:
    """Rounds done at a numbered checkpoint or file of networks; -1 for another file."""
    match = NUMBERED_FILE.fullmatch(path.name)
    return int(match[1] or match[2]) if match else -1


def _numbered(paths: Iterable[Path], kind: str) -> list[Path]:
    numbered = (path for path in paths if path.name.startswith(f"{kind}_") and rounds_of(path) >= 0)
    return sorted(numbered, key=rounds_of)


def find_checkpoint(path_text: str, setting: str) -> Path:
    """The checkpoint `path_text`, or the newest whole one of a run folder; raises UserError, which
    names `setting`, and for a damaged one the newest whole one before it.
    """
    path = user_path(setting, path_text)
    label = f"{setting}={one_line(path_text)}"
    if path.is_dir():
        checkpoints = RunFolder(path.resolve()).checkpoints()
        if not checkpoints:
            runs = sorted(config.parent.name for config in path.glob("*/config.yaml"))
            remedy = "Give a checkpoint or a run folder"
            remedy += f", such as {one_line(path / runs[-1])}" if runs else ""
            raise UserError(f"{label}: there is no checkpoint in this folder. {remedy}")
        return newest_undamaged(checkpoints, label)
    if not path.exists():
        remedy = ". resume=auto goes on with the newest run" if setting == "resume" else ""
        raise UserError(f"{label}: there is no such file or folder{remedy}")
    if path.is_symlink() and (rounds_of(path) >= 0 or path.name in RESULT_FILES):
        raise refusal(path, path.lstat())  # a run goes on where its checkpoint is
    path = path.resolve()
    reason = find_damage(path)
    if reason is None:
        return path
    for older in reversed(RunFolder(path.parent).checkpoints()):
        newer = rounds_of(older) > rounds_of(path) >= 0
        if not newer and find_damage(older) is None:
            reason += f". The newest whole one before it is {older}"
            break
    raise CheckpointError(f"{label}: {reason}")


def damaged_newer(checkpoint: Path) -> list[str]:
    """The faults of damaged checkpoints newer than `checkpoint`; each names both."""
    checkpoints = RunFolder(checkpoint.parent).checkpoints() if rounds_of(checkpoint) >= 0 else []
    reasons = (find_damage(path) for path in checkpoints if rounds_of(path) > rounds_of(checkpoint))
    return [f"{reason}; {checkpoint.name} is taken" for reason in reasons if reason is not None]


def newest_undamaged(checkpoints: list[Path], label: str) -> Path:
    """The last of `checkpoints` that is not damaged; raises CheckpointError where all are."""
    reasons = []
    for path in reversed(checkpoints):
        reason = find_damage(path)
        if reason is None:
            return path.resolve()
        reasons.append(reason)
    more = f" (and {len(reasons) - 1} older ones are no better)" if len(reasons) > 1 else ""
    raise CheckpointError(f"{label}: {reasons[0]}{more}. Give another run folder")


def dated_folders(parent: Path, prefix: str = "") -> list[Path]:
    """Folders named by `prefix` and time in `parent`, newest first."""
    paths = parent.glob(f"{prefix}*")
    stamps = {path: TIME_STAMP.fullmatch(path.name.removeprefix(prefix)) for path in paths}
    dated = [(stamp[1], int(stamp[2] or 1), path) for path, stamp in stamps.items() if stamp]
    return [path for *_, path in sorted(dated, reverse=True)]


def open_run_folder(run_dir: str, name: str) -> RunFolder:
    """Make `run_dir`, or runs/`name`/<time> where it is empty; raises UserError where the folder
    cannot be written or already holds the results of a run.
    """
    if not run_dir:
        return RunFolder(make_dated_folder(RUNS_FOLDER / name))
    folder = writable(user_path("run_dir", run_dir), "run_dir")
    names = [*RESULT_FILES, folder.networks.name, *(path.name for path in folder.checkpoints())]
    existing = [name for name in names if (folder.path / name).exists()]
    if existing:
        problem = f"already holds the results of a run ({', '.join(existing)})"
        remedy = "Choose another folder, or go on with resume=auto."
        raise UserError(f"run_dir={folder.path}: {problem}. {remedy}")
    return folder


def make_dated_folder(parent: Path, prefix: str = "") -> Path:
    """Make a folder that nobody else has, `parent`/`prefix`<time>; raises UserError."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = parent / f"{prefix}{stamp}"
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            MADE_HERE.add(path.resolve())
            return path.resolve()
        except FileExistsError:
            number += 1
            path = parent / f"{prefix}{stamp}_{number}"
        except OSError as error:
            raise unwritable(path, "run_dir", error) from error


def remove_begun(folder: RunFolder) -> None:
    """Delete what a run writes that begins, and its folder where this process has made it; nothing
    where there is more, as of a run that has played.
    """
    begun = (folder.config, folder.overrides, folder.versions, folder.log, folder.lock)
    names = {path.name for path in begun}
    entries = list_folder(folder.path)
    if any(path.name not in names and path != folder.hydra for path in entries):
        return
    with suppress(OSError):  # a folder with further files, or that cannot be written
        for path in [*list_folder(folder.hydra), *(path for path in entries if path.name in names)]:
            remove(path)
        if folder.hydra in entries:
            folder.hydra.rmdir()
        if folder.path in MADE_HERE:
            folder.path.rmdir()


def writable(path: Path, setting: str) -> RunFolder:
    """The folder `path`, made where it is new; claiming it shows whether it can be written."""
    try:
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, setting, error) from error
    folder = RunFolder(path.resolve())
    MADE_HERE.update([folder.path] * is_new)
    return folder


def unwritable(path: Path, setting: str, error: OSError) -> UserError:
    """The refusal of a run in the folder `path`, for which the setting stands."""
    if isinstance(error, UserError):
        return error
    reason = f"cannot be written ({reason_of(error)})"
    return UserError(f"{setting}={path}: {reason}. Choose another with run_dir=...")


def write_config(folder: RunFolder, resolved_yaml: str, overrides: list[str] | None = None) -> None:
    """Write the settings, and the overrides that led to them, which a resumed run keeps."""
    write_text(folder.config, resolved_yaml)
    if overrides is not None:
        write_text(folder.overrides, "".join(f"{line}\n" for line in overrides))


def write_versions(folder: RunFolder, device: str, facts: Mapping[str, Json]) -> None:
    """Replace versions.json: software, machine, `device` name, `facts` of data and kernels."""
    record: dict[str, Json] = {
        "python": platform.python_version(),
        "packages": package_versions(),
        "git": _git_revision(Path(__file__).resolve().parents[3]),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
    }
    write_json(folder.versions, record | dict(facts))


def _git_revision(checkout: Path) -> str | None:
    """Commit of the checkout, '+changes' where tracked files differ; None outside of one."""
    if not (checkout / ".git").exists():
        return None
    words = ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # without locks: a run that is cut off must not leave the checkout locked
    command = ["git", "--no-optional-locks", "-C", str(checkout), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    head, *rest = done.stdout.splitlines() or [""]
    changes = "+changes" * any(not line.startswith("#") for line in rest)
    return head.removeprefix("# branch.oid ") + changes or None
