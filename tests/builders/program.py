"""Starts the program in processes of its own (forks of one that has torch imported, see warm.py),
with as little work as possible: what the tests of files, signals and streams share.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.builders import warm

# Two hosts of 77 parameters on a handful of images: a round takes a tenth of a second, the start
# some seconds.
TINY = shlex.split(
    "+experiment=smoke rounds=2 steps=2 train_samples=16 val_samples=8 data.synthetic_train=32 "
    "device=cpu data.synthetic_test=16 compute.threads=1 compute.workers=1 compute.engine=torch"
)
# An empty PYTHONUNBUFFERED is none: streams hold back what they are given, as they do for users.
OURS = {"HYDRA_FULL_ERROR": "0", "TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": ""}
ENVIRONMENT = os.environ | OURS
PATIENCE = 250  # seconds; a guard against waiting for ever, not a measurement


def command(*overrides: str, program: str = "train") -> list[str]:
    """The command line of `program` (train or evaluate)."""
    return [sys.executable, "-m", f"esper_soa.{program}", *overrides]


def finished(
    *overrides: str, folder: Path, program: str = "train", limits: dict[int, int] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program with `overrides`, run to its end in `folder`; as `started`."""
    given = {"cwd": folder, "env": ENVIRONMENT, "text": True, "limits": limits}
    asked = command(*overrides, program=program)
    return warm.run(asked, capture_output=True, timeout=PATIENCE, **given)


def started(
    *overrides: str, folder: Path, program: str = "train", limits: dict[int, int] | None = None
) -> subprocess.Popen[str]:
    """The program with `overrides`, running in `folder`; `limits` of `resource` by their number."""
    given = {"cwd": folder, "env": ENVIRONMENT, "text": True, "limits": limits}
    pipe = subprocess.PIPE
    return warm.Popen(command(*overrides, program=program), stdout=pipe, stderr=pipe, **given)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Return once `ready`; raises TimeoutError where it never is, or where a `process` that is
    given ends before.
    """
    for _ in range(100 * PATIENCE):
        ended = process is not None and process.poll() is not None
        if ready():
            return
        if ended:
            raise TimeoutError(f"it ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.01)
    raise TimeoutError("it did not come to that")


def lines(path: Path) -> list[str]:
    """The lines of the text file `path`; none where it is not there yet."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` but the lock, with what is in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
