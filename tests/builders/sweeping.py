"""Starts sweeps and finds the processes of their jobs: what the tests of launchers share."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.builders import warm
from tests.builders.program import ENVIRONMENT, PATIENCE, TINY, lines, wait_until

# A job of some seconds beyond its start, with a checkpoint after every round.
LONG = [
    *TINY,
    *("rounds=24", "checkpoint_every=1", "control=none", "report=false", "telemetry.progress=off"),
]


def sweep_command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "esper_soa.train", "-m", *overrides, "run_dir=sweep"]


def started_sweep(*overrides: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A sweep that is running in `folder`, in a session of its own; what it says goes to
    sweep.log.
    """
    given = {"cwd": folder, "env": ENVIRONMENT | environment, "text": True}
    given |= {"stderr": subprocess.STDOUT, "start_new_session": True}
    with (folder / "sweep.log").open("w") as log:
        return warm.Popen(sweep_command(*overrides), stdout=log, **given)


def finished_sweep(
    *overrides: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = {"cwd": folder, "env": ENVIRONMENT | environment, "text": True}
    return warm.run(sweep_command(*overrides), capture_output=True, timeout=2 * PATIENCE, **given)


def holder(run: Path) -> int:
    """The process that has claimed a run folder; 0 where there is none."""
    lock = str((run / ".lock").resolve())
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and lock in opened(process):
            return int(process.name)
    return 0


def opened(process: Path) -> list[str]:
    """The files that a process has open, as far as this one may know."""
    found = []
    with suppress(OSError):  # it has ended meanwhile, or is somebody else's
        for one in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                found.append(os.readlink(one))
    return found


def killed_in_the_middle(
    run: Path, process: subprocess.Popen[str], number: int = signal.SIGKILL
) -> int:
    """Kill the job in the folder `run` once it has a checkpoint; the rounds that it had written."""
    wait_until(
        lambda: len(lines(run / "metrics.jsonl")) >= 2 and any(run.glob("checkpoint_*.pt")), process
    )
    job = holder(run)
    assert job
    os.kill(job, number)
    wait_until(lambda: holder(run) != job, process)
    rounds = len(lines(run / "metrics.jsonl"))
    assert not (run / "summary.json").exists()
    return rounds


def jobs_of(folder: Path, what: str = "status") -> dict[str, str]:
    """What sweep.json says of the jobs, by their overrides."""
    written = json.loads((folder / "sweep" / "sweep.json").read_text())
    return {" ".join(job["overrides"]): job[what] for job in written["jobs"]}


def rounds_of(run: Path) -> list[int]:
    """The rounds in metrics.jsonl that are written to their end."""
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line)["round"] for line in whole.splitlines()]
