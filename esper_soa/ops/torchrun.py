"""Which rank of a run this process is, as torchrun or the launcher of the package tells it in its
environment.

Needs no torch.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from esper_soa.errors import UserError
from esper_soa.ops.files import reason_of
from esper_soa.ops.rundir import RunFolder
from esper_soa.paths import user_path


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


def launched_folder(here: Place, asked: str, name: str, root: str = "runs") -> RunFolder:
    """The folder of a run whose ranks torchrun has started: `asked`, or `root`/`name`/<id of the
    launch>.

    The same for all ranks, on every machine, and at every start: torchrun tells only the machine of
    a rank that was lost that it starts all again, so a folder that there is, is that of this run.
    Raises UserError where it cannot be made.
    """
    path = user_path("run_dir", asked) if asked else Path(root) / name / here.run_id
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        words = f"run_dir={path}: cannot be written ({reason_of(error)})"
        raise UserError(f"{words}. Choose another with run_dir=...") from error
    return RunFolder(path.resolve())


def core_group(rank: int, ranks: int) -> list[int]:
    """The CPU cores of one of the processes on this machine: those that all may use are cut into
    equal groups.

    Where there are fewer cores than processes, several share one.
    """
    cores = list(range(os.cpu_count() or 1))
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
    first, end = (len(cores) * edge // ranks for edge in (rank, rank + 1))
    return cores[first:end] or [cores[first]]


def keep_to_cores(rank: int, ranks: int) -> None:
    """Keep this process, the `rank`-th on its machine, to its cores, before it works (on Linux)."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, core_group(rank, ranks))
