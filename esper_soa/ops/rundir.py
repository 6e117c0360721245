"""The folder of a run: where it is, what lies in it, and the two records that make a run repeatable.

The entry point makes it and writes config.yaml; the trainer writes versions.json once device and data are known.
Needs no torch.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path

from esper_soa.errors import UserError

RESULTS = ("metrics.jsonl", "summary.json", "checkpoint.pt")
PACKAGES = ("esper-soa", "torch", "tensordict", "numpy", "hydra-core", "rich")


@dataclass(frozen=True)
class RunFolder:
    """Paths of everything that a run leaves behind."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """What was given on the command line, one override a line."""
        return self.path / "overrides.txt"

    @property
    def versions(self) -> Path:
        """Software, machine, device and data."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per policy update."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The final table as JSON."""
        return self.path / "summary.json"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.path / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """What was said on the console, with times."""
        return self.path / "log.txt"


def open_run_folder(run_dir: str, name: str, root: str = "runs") -> RunFolder:
    """Make `run_dir`, or `root`/`name`/<time> where it is empty.

    Raises UserError where the folder cannot be written or already holds the results of a run.
    """
    if run_dir:
        return _create(Path(run_dir), "run_dir")
    parent = Path(root) / name
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = parent / stamp
    number = 1
    while path.exists():
        number += 1
        path = parent / f"{stamp}_{number}"
    return _create(path, "run_dir")


def open_sweep_folder(sweep_dir: str, job: int) -> RunFolder:
    """Make the folder of job number `job` of a sweep."""
    return _create(Path(sweep_dir) / str(job), "run_dir")


def _create(path: Path, setting: str) -> RunFolder:
    probe = path / f".probe_{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{setting}={path}: cannot be written ({reason}). Choose another with run_dir=...") from error
    found = [name for name in RESULTS if (path / name).exists()]
    if found:
        raise UserError(
            f"{setting}={path}: already holds the results of a run ({', '.join(found)}). Choose another folder."
        )
    return RunFolder(path.resolve())


def write_config(folder: RunFolder, resolved_yaml: str, overrides: list[str]) -> None:
    """Write the resolved settings and the overrides that led to them."""
    folder.config.write_text(resolved_yaml, encoding="utf-8")
    folder.overrides.write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")


def write_versions(folder: RunFolder, device: str, data: Mapping[str, str]) -> None:
    """Write versions.json: packages, source revision, machine, `device` name, and what `data` says of the data set."""
    record = {
        "python": platform.python_version(),
        "packages": {name: _package_version(name) for name in PACKAGES},
        "git": _git_revision(Path(__file__).resolve().parents[2]),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "data": dict(data),
    }
    folder.versions.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_revision(checkout: Path) -> str | None:
    """Commit of the checkout, with '+changes' where tracked files differ from it; None outside a checkout."""
    if not (checkout / ".git").exists():
        return None
    revision = _git(checkout, "rev-parse", "HEAD")
    if not revision:
        return None
    return revision + ("+changes" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else "")


def _git(checkout: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
