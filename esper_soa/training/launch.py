"""Starts the ranks of a run and plays one: a process per device, or group of cores, by torch's API.

With ranks=K this process starts K others, each of which runs `main` of this module, and waits:
where one is lost the launcher ends the others, and starts all again as often as `restarts` says.
Ranks meet in a file, and end themselves when this process is gone; torchrun starts its own.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from esper_soa.config.errors import OutOfRoomError, RankLostError, UserError, check, one_line
from esper_soa.config.settings import TrainConfig, settings_from_yaml, settings_yaml
from esper_soa.runtime.console import Outlet, standing_streams
from esper_soa.runtime.device import resolve_device
from esper_soa.runtime.files import LOGGER, IncompleteError, write_text
from esper_soa.runtime.ranks import PATIENCE, RankGroup, keep_to_cores
from esper_soa.runtime.signals import SAVING, Interrupted, reacting
from esper_soa.training.run_folder import RunFolder, rounds_of
from esper_soa.training.session import Session, unheard
from esper_soa.training.start import Place, find_start, place
from esper_soa.training.trainer import run_within

# What ends a rank with a message alone, by the word for it in the note that it leaves.
FAULTS: dict[str, type[Exception]] = {
    "user": UserError,
    "room": OutOfRoomError,
    "incomplete": IncompleteError,
    "lost": RankLostError,
}
CONSEQUENCES = ("lost", "stopped")  # of what happened to another rank, or to the launcher
# that torch's launcher takes
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def train_within(within: Session, cfg: TrainConfig, checkpoint: Path | None) -> float:
    """Run the whole job on as many ranks as the settings say; returns the final accuracy (percent).

    Raises RankLostError where a rank was lost for good, with the checkpoint to go on from.
    """
    here = place()
    if here is not None:
        return play_rank(within, replace(cfg, resume=cfg.resume or "auto"), checkpoint, here)
    if cfg.ranks == 1:
        return run_within(within, cfg, checkpoint).accuracy
    check_devices(cfg, cfg.ranks)
    with TemporaryDirectory(prefix="esper_ranks_") as scratch:
        job = {
            "launcher": os.getpid(),
            "folder": str(within.folder.path),
            "checkpoint": str(checkpoint or ""),
            "path": sys.path,
            "settings": settings_yaml(cfg),
            "verbose": within.verbose,
        }
        write_text(Path(scratch, "job.json"), json.dumps(job))
        _launch(within.folder, cfg, Path(scratch))
    summary = json.loads(within.folder.summary.read_text(encoding="utf-8"))
    return float(summary["grown"]["accuracy"])


def _launch(folder: RunFolder, cfg: TrainConfig, scratch: Path) -> None:
    """Start the ranks and wait for their end; raises what ended them early."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=cfg.ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(scratch / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(str(scratch)),
        max_restarts=cfg.restarts,
    )

    def react(number: int) -> None:
        if number != SAVING:
            raise Interrupted(number)
        first = scratch / "pid"
        if first.exists():
            os.kill(int(first.read_text(encoding="ascii")), number)

    try:
        # torch's launcher replaces the handlers of STOPS, and leaves its own
        with _quiet_launcher(), reacting(react, (SAVING, *STOPS)):
            elastic_launch(config, sys.executable)("-m", "esper_soa.training.launch", str(scratch))
    except SignalException as stop:
        raise Interrupted(int(stop.sigval), _told(scratch).get("unsaved", "")) from None
    except ChildFailedError as failed:
        raise _what_failed(failed, folder, cfg, _told(scratch)) from None


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """torch's launcher without its log, which our message says in one line, and without a server of
    its own, which would listen on every interface.
    """
    log = logging.getLogger("torch.distributed.elastic")
    before = log.propagate
    nothing = logging.NullHandler()
    unset = FRESH_STORE not in os.environ
    log.addHandler(nothing)
    log.propagate = False
    os.environ.setdefault(FRESH_STORE, "1")
    try:
        yield
    finally:
        log.removeHandler(nothing)
        log.propagate = before
        if unset:
            del os.environ[FRESH_STORE]


def _told(scratch: Path) -> dict:
    """The first fault told by a rank, one of CONSEQUENCES only where alone; empty for none."""
    told = [json.loads(path.read_text(encoding="utf-8")) for path in scratch.glob("fault_*.json")]
    return min(told, key=lambda one: (one["kind"] in CONSEQUENCES, one["time"]), default={})


def _what_failed(
    failed: ChildFailedError, folder: RunFolder, cfg: TrainConfig, fault: dict
) -> Exception:
    """What ended the run, as one error: the fault that a rank told, or how the first one ended."""
    kind = fault.get("kind", "lost")
    if kind in FAULTS and kind not in CONSEQUENCES:
        return FAULTS[kind](fault["words"])
    rank, failure = failed.get_first_failure()
    words = f"rank {rank} of {cfg.ranks} was ended by {failure.signal_name()}"
    if kind not in CONSEQUENCES:
        words = f"rank {fault['rank']} of {cfg.ranks} failed ({fault['words']})"
    elif failure.exitcode >= 0:
        words = f"rank {rank} of {cfg.ranks} ended with status {failure.exitcode}"
    again = f" {cfg.restarts} restarts were of no avail." if cfg.restarts else ""
    return RankLostError(
        f"{words}; the others have been ended.{again} {way_on(folder, cfg.rounds)}"
    )


def way_on(folder: RunFolder, rounds: int) -> str:
    """How to go on with the run in `folder`, in words."""
    saved = folder.checkpoints()
    if not saved:
        return "No round is saved yet; resume=auto with the same run_dir begins again"
    done = f"{saved[-1].name} holds {rounds_of(saved[-1])} of {rounds} rounds."
    return f"{done} Go on with resume={folder.path}"


def check_devices(cfg: TrainConfig, ranks: int) -> None:
    """Raise SettingError where there are fewer GPUs here than `ranks`, which take one each."""
    if resolve_device(cfg.device).type == "cuda":
        count = torch.cuda.device_count()
        allowed = f"such that a machine has at most {count}, the GPUs of this one"
        remedy = "device=cpu takes the CPU's cores instead."
        check(ranks <= count, "ranks", cfg.ranks, allowed, remedy)


def main() -> None:
    """Play the rank this process was started for; the argument is the launcher's scratch folder."""
    scratch = Path(sys.argv[1])
    here = place()
    assert here is not None, "this module is run by the launcher of ranks"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # all ranks are on this machine
    job = json.loads((scratch / "job.json").read_text(encoding="utf-8"))
    sys.path[:] = job["path"]
    threading.Thread(target=_end_with, args=(job["launcher"],), daemon=True).start()
    meeting = f"file://{scratch}/store_{here.restarts}"
    fault = scratch / f"fault_{here.rank}.json"
    with _telling(fault, here.rank), standing_streams(), unheard():
        cfg = settings_from_yaml(job["settings"])
        if not here.first:
            play_beside(cfg, here, meeting)
            return
        write_text(scratch / "pid", str(os.getpid()))
        within = Session(RunFolder(Path(job["folder"])), job["verbose"])
        with within.speaking():
            checkpoint = Path(job["checkpoint"]) if job["checkpoint"] else None
            if here.restarts:
                cfg = replace(cfg, resume="auto")
                checkpoint = find_start(cfg, within.folder).checkpoint
            play_rank(within, cfg, checkpoint, here, meeting)


def _end_with(launcher: int) -> None:
    """Ask this process to stop, with a checkpoint, once it is no longer a child of `launcher`."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _telling(path: Path, rank: int) -> Iterator[None]:
    """Leave a note of what ends the context early, for the launcher; what is known by a message
    ends the process with its status.
    """
    path.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    finally:
        error = sys.exception()
        known = next((word for word, kind in FAULTS.items() if isinstance(error, kind)), "")
        if error is not None:
            told = {
                "kind": known or ("stopped" if isinstance(error, SystemExit) else "error"),
                "rank": rank,
                "words": str(error) if known else f"{type(error).__name__}: {error}",
                "time": time.time(),
                "unsaved": error.unsaved if isinstance(error, Interrupted) else "",
            }
            write_text(path, json.dumps(told))
        if known:
            sys.exit(2 if known == "user" else 1)


def play_beside(cfg: TrainConfig, here: Place, meeting: str = "env://") -> float:
    """Play a rank other than the first, which says nothing and writes nothing; returns the final
    accuracy (percent). The rest is as of `play_rank`.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        LOGGER.disabled = True
        within = Session(RunFolder(Path(os.devnull)), 0, Outlet(nowhere))
        telemetry = replace(cfg.telemetry, progress="off")
        silent = replace(cfg, report=False, track=[], telemetry=telemetry)
        return play_rank(within, silent, None, here, meeting)


def play_rank(
    within: Session, cfg: TrainConfig, checkpoint: Path | None, here: Place, meeting: str = "env://"
) -> float:
    """Play the rank `here` of a run, from `checkpoint` on; returns the final accuracy (percent).

    meeting: where ranks find each other, for torch.distributed. Raises RankLostError, with the
    checkpoint to go on from, where another rank does not go on.
    """
    allowed = f"{here.processes}, the processes that were started"
    check(cfg.ranks == here.processes, "ranks", cfg.ranks, allowed)
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
    _meet(device, here, meeting)
    beside = here.local_processes if device.type == "cpu" else 1
    group = RankGroup(cfg.envs, here.local_rank, beside)
    try:
        accuracy = run_within(within, cfg, checkpoint, ranks=group).accuracy
        group.of_all(None)  # nobody leaves before all have come to the end
    except RankLostError as error:
        raise RankLostError(f"{error}. {way_on(within.folder, cfg.rounds)}") from error
    dist.destroy_process_group()
    return accuracy


def _meet(device: torch.device, here: Place, meeting: str) -> None:
    """Connect with the other ranks; raises RankLostError where they cannot be reached."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, meeting, PATIENCE, here.processes, here.rank)
    except RuntimeError as error:
        raise RankLostError(
            f"the other ranks cannot be reached ({one_line(error)}). Give torchrun {FRESH_STORE}=1,"
            " so that ranks started again do not look for those that are gone."
        ) from error


if __name__ == "__main__":
    main()
