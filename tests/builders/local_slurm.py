"""Stands in for Slurm on a machine without it: sbatch, srun, scontrol requeue and sacct, by the
name it is called with.

sbatch starts every job of an array at once as a process of this machine; a job that is queued again
starts once its process has ended. What it knows is in the folder LOCAL_SLURM: the script, and a
file per job with its process.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["LOCAL_SLURM"])
NUMBER = "77"


def start(task: int) -> None:
    """Start a job of the array, and note its process."""
    given = {
        "SLURM_JOB_ID": f"{NUMBER}{task}",
        "SLURM_ARRAY_JOB_ID": NUMBER,
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    process = subprocess.Popen(
        ["bash", str(FOLDER / "script")],
        env=os.environ | given,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (FOLDER / f"{task}.pid").write_text(str(process.pid))


def runs(task: int) -> bool:
    """Whether the process of a job is there, and not one that has ended and was not waited for."""
    try:
        status = Path("/proc", (FOLDER / f"{task}.pid").read_text(), "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def sbatch(script: str) -> None:
    """Keep the script and start its jobs."""
    text = Path(script).read_text()
    (FOLDER / "script").write_text(text)
    last = re.search(r"^#SBATCH --array=0-(\d+)%", text, re.MULTILINE)
    assert last is not None
    for task in range(int(last[1]) + 1):
        start(task)
    print(f"Submitted batch job {NUMBER}")


def srun(arguments: list[str]) -> None:
    """Become the command; its output goes where it should."""
    options = dict(zip(arguments[1:-1:2], arguments[2::2], strict=False))
    place = {"%A": NUMBER, "%a": os.environ["SLURM_ARRAY_TASK_ID"], "%t": "0"}
    for option, descriptor in (("--output", 1), ("--error", 2)):
        path = re.sub("%[Aat]", lambda found: place[found[0]], options[option])
        # jobs of a real cluster begin after submitit has made their folders
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    command = arguments[5:]
    os.execvp(command[0], command)


def scontrol(asked: str, job: str) -> None:
    """Start the job again once its process has ended; in a process of its own, as jobs may ask."""
    assert asked == "requeue"
    task = int(job.rpartition("_")[2])
    with (FOLDER / "requeued").open("a") as told:
        told.write(f"{job}\n")
    if os.fork() == 0:
        os.setsid()
        while runs(task):
            time.sleep(0.05)
        start(task)


def sacct() -> None:
    """The states of all jobs."""
    print("JobID|State|NodeList")
    for path in sorted(FOLDER.glob("*.pid")):
        print(f"{NUMBER}_{path.stem}|{'RUNNING' if runs(int(path.stem)) else 'COMPLETED'}|here")


if __name__ == "__main__":
    name = Path(sys.argv[0]).name
    if name == "sbatch":
        sbatch(sys.argv[-1])
    elif name == "srun":
        srun(sys.argv[1:])
    elif name == "scontrol":
        scontrol(*sys.argv[1:])
    elif name == "sacct":
        sacct()
    else:
        sys.exit(f"{name} is not here")
