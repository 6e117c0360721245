"""Starts the ranks of a run and plays one: a process per device, or per group of cores, by torch's
elastic launcher.

`train_within` is what the command line and `esper_soa.train` call with a session in the folder of
the run. A run of one rank is played there and then. With ranks=K this process starts K others, each
of which runs `main` of this module, and
waits: where one is lost the launcher ends the others, and starts all again as often as `restarts`
says. Under torchrun the processes are there already, and each plays its rank.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import cast
from uuid import uuid4

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from esper_soa.config import TrainConfig, settings_from_mapping, settings_yaml
from esper_soa.errors import OutOfRoomError, RankLostError, UserError, check, one_line
from esper_soa.ops.console import Outlet, outlet, standing_streams
from esper_soa.ops.device import resolve_device
from esper_soa.ops.files import LOGGER, IncompleteError, write_text
from esper_soa.ops.interrupt import SAVING, Interrupted, reacting
from esper_soa.ops.rundir import RunFolder, rounds_of
from esper_soa.ops.session import Session, unheard
from esper_soa.ops.start import find_start
from esper_soa.ops.torchrun import Place, keep_to_cores, place
from esper_soa.ranks import PATIENCE, RankGroup
from esper_soa.trainer import run_within

JOB = "job.json"  # what launcher and ranks tell each other, in a folder
PID = "pid"
FAULT = "fault_{rank}.json"
# What ends a rank with a message alone, by the word for it, and the exit status.
FAULTS: dict[str, tuple[type[BaseException], int]] = {
    "user": (UserError, 2),
    "room": (OutOfRoomError, 1),
    "incomplete": (IncompleteError, 1),
    "lost": (RankLostError, 1),
}
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LAUNCHER_LOG = "torch.distributed.elastic"


def train_within(within: Session, cfg: TrainConfig, checkpoint: Path | None) -> float:
    """Run the whole job, as run_within, on as many ranks as the settings say; returns the final
    accuracy (percent).

    Raises RankLostError where a rank was lost and is not started again, with the checkpoint to go
    on from.
    """
    here = place()
    if here is not None:
        return play_rank(within, replace(cfg, resume=cfg.resume or "auto"), checkpoint, here)
    if cfg.ranks == 1:
        return run_within(within, cfg, checkpoint).accuracy
    check_devices(cfg, cfg.ranks)
    with TemporaryDirectory(prefix="esper_ranks_") as scratch:
        told = {
            "folder": str(within.folder.path),
            "checkpoint": str(checkpoint or ""),
            "path": sys.path,
            "settings": settings_yaml(cfg),
        }
        write_text(Path(scratch) / JOB, json.dumps(told))
        _launch(within, cfg, Path(scratch))
    summary = json.loads(within.folder.summary.read_text(encoding="utf-8"))
    return float(summary["grown"]["accuracy"])


def play_beside(cfg: TrainConfig, here: Place) -> float:
    """Play a rank other than the first, which torchrun has started; returns the final accuracy
    (percent).
    """
    with silent(RunFolder(Path(os.devnull))) as within:
        return play_rank(within, cfg, None, here)


def play_rank(within: Session, cfg: TrainConfig, checkpoint: Path | None, here: Place) -> float:
    """Play the rank `here` of a run, from `checkpoint` on where the first rank has one; returns the
    final accuracy.

    Raises RankLostError, with the checkpoint to go on from, where another rank does not go on.
    """
    check(
        cfg.ranks == here.processes,
        "ranks",
        cfg.ranks,
        f"{here.processes}, the processes that were started",
    )
    check_devices(cfg, here.local_processes)
    device = resolve_device(cfg.device, here.local_rank)
    if device.type == "cpu":
        keep_to_cores(here.local_rank, here.local_processes)
    else:
        torch.cuda.set_device(device)
    if here.restarts:
        LOGGER.warning(
            "ranks    all %d were started again, for the %d. time", here.processes, here.restarts
        )
    if not here.first:
        cfg = replace(cfg, report=False, track=[], telemetry=replace(cfg.telemetry, progress="off"))
    _meet(device)
    beside = here.local_processes if device.type == "cpu" else 1
    group = RankGroup(cfg.envs, here.local_rank, beside)
    try:
        accuracy = run_within(within, cfg, checkpoint, ranks=group).accuracy
        group.of_all(None)  # nobody leaves before all have come to the end
    except RankLostError as error:
        raise RankLostError(f"{error}. {way_on(within.folder, cfg.rounds)}") from error
    dist.destroy_process_group()
    return accuracy


def _meet(device: torch.device) -> None:
    """Connect with the other ranks; raises RankLostError where they cannot be reached."""
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    except RuntimeError as error:
        remedy = (
            f" Give torchrun {FRESH_STORE}=1, so that ranks started again do not look for "
            "those that are gone."
        )
        raise RankLostError(
            f"the other ranks cannot be reached ({one_line(error)}).{remedy}"
        ) from error


def check_devices(cfg: TrainConfig, ranks: int) -> None:
    """Raise SettingError where there are fewer GPUs than `ranks` on this machine, and they are to
    have one each.
    """
    if resolve_device(cfg.device).type == "cuda":
        count = torch.cuda.device_count()
        check(
            ranks <= count,
            "ranks",
            cfg.ranks,
            f"such that a machine has at most {count}, the GPUs of this one",
            "device=cpu takes the CPU's cores instead.",
        )


def way_on(folder: RunFolder, rounds: int) -> str:
    """How to go on with the run in `folder`, in words."""
    saved = folder.checkpoints()
    if not saved:
        return "No round is saved yet; resume=auto with the same run_dir begins again"
    return (
        f"{saved[-1].name} holds {rounds_of(saved[-1])} of {rounds} rounds. Go on with "
        f"resume={folder.path}"
    )


def _launch(within: Session, cfg: TrainConfig, scratch: Path) -> None:
    """Start the ranks and wait for their end; raises what ended them early."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=cfg.ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=cfg.restarts,
    )

    def save(number: int) -> None:
        first = scratch / PID
        if first.exists():
            os.kill(int(first.read_text(encoding="ascii")), number)

    try:
        with _handlers_kept(), _quiet_launcher(), _fresh_stores(), reacting(save, (SAVING,)):
            elastic_launch(config, sys.executable)("-m", "esper_soa.launch", str(scratch))
    except SignalException as stop:
        unsaved = str(_told(scratch).get("unsaved", ""))
        raise Interrupted(int(stop.sigval), unsaved) from None
    except ChildFailedError as failed:
        raise _what_failed(failed, within.folder, cfg, scratch) from None


def _what_failed(
    failed: ChildFailedError, folder: RunFolder, cfg: TrainConfig, scratch: Path
) -> BaseException:
    """What ended the run, as one error: the fault that a rank has told, or how the first one
    ended.
    """
    fault = _told(scratch)
    if fault and fault["kind"] in FAULTS and fault["kind"] != "lost":
        return FAULTS[fault["kind"]][0](fault["words"])
    rank, failure = failed.get_first_failure()
    words = f"rank {rank} of {cfg.ranks} was ended by {failure.signal_name()}"
    if fault and fault["kind"] not in ("lost", "stopped"):
        words = f"rank {fault['rank']} of {cfg.ranks} failed ({fault['words']})"
    elif failure.exitcode >= 0:
        words = f"rank {rank} of {cfg.ranks} ended with status {failure.exitcode}"
    again = f" {cfg.restarts} restarts were of no avail." if cfg.restarts else ""
    return RankLostError(
        f"{words}; the others have been ended.{again} {way_on(folder, cfg.rounds)}"
    )


def _told(scratch: Path) -> dict:
    """The first fault that a rank has told, but for that of having lost another one; empty where
    there is none.
    """
    told = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in scratch.glob(FAULT.format(rank="*"))
    ]
    return min(told, key=lambda one: (one["kind"] in ("lost", "stopped"), one["time"]), default={})


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put the signal handlers that the launcher replaces back in place."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _fresh_stores() -> Iterator[None]:
    """Have ranks that are started again meet in a store of their own: in the one before, the
    addresses are old.
    """
    before = os.environ.get(FRESH_STORE)
    os.environ[FRESH_STORE] = "1"
    try:
        yield
    finally:
        del os.environ[FRESH_STORE]
        if before is not None:
            os.environ[FRESH_STORE] = before


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Without what the launcher logs of processes that end, which our message says in one line."""
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith(LAUNCHER_LOG)
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def silent(folder: RunFolder) -> Iterator[Session]:
    """A session that says nothing and writes nothing, of a rank that is not the first."""
    nothing = logging.NullHandler()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        within = Session(folder, Outlet(nowhere))
        LOGGER.addHandler(nothing)
        LOGGER.propagate = False
        try:
            yield within
        finally:
            LOGGER.removeHandler(nothing)


@contextmanager
def joined(folder: RunFolder) -> Iterator[Session]:
    """A session of the first rank, in a folder that the launcher has claimed."""
    within = Session(folder, outlet(sys.stdout))
    try:
        with within.speaking():
            yield within
    finally:
        within.close()


class _Telling:
    """Leaves a note of what ends its context, for the launcher; known faults then end the process
    with a status.
    """

    def __init__(self, scratch: Path, rank: int) -> None:
        self._path = scratch / FAULT.format(rank=rank)
        self._rank = rank

    def __enter__(self) -> None:
        self._path.unlink(missing_ok=True)  # of an earlier start

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        known = next((word for word, (one, _) in FAULTS.items() if isinstance(error, one)), "")
        other = "stopped" if isinstance(error, SystemExit) else "error"
        words = str(error) if known else f"{type(error).__name__}: {error}"
        told = {"kind": known or other, "rank": self._rank, "words": words, "time": time.time()}
        if isinstance(error, Interrupted):
            told["unsaved"] = error.unsaved
        write_text(self._path, json.dumps(told))
        if known:
            sys.exit(FAULTS[known][1])


def main() -> None:
    """Play the rank that this process was started for; the argument is the folder where the
    launcher says what.
    """
    scratch = Path(sys.argv[1])
    here = place()
    assert here is not None, "this module is run by the launcher of ranks"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # all ranks are on this machine
    told = json.loads((scratch / JOB).read_text(encoding="utf-8"))
    sys.path[:] = told["path"]
    if here.first:
        write_text(scratch / PID, str(os.getpid()))
    with _Telling(scratch, here.rank), standing_streams(), unheard():
        cfg = settings_from_mapping(
            cast(dict, OmegaConf.to_container(OmegaConf.create(told["settings"])))
        )
        folder = RunFolder(Path(told["folder"]))
        if not here.first:
            play_beside(cfg, here)
            return
        with joined(folder) as within:
            checkpoint = Path(told["checkpoint"]) if told["checkpoint"] else None
            if here.restarts:
                cfg = replace(cfg, resume="auto")
                checkpoint = find_start(cfg, folder).checkpoint
            play_rank(within, cfg, checkpoint, here)


if __name__ == "__main__":
    main()
