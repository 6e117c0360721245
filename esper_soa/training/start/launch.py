"""Starts the ranks of a run and runs one: a process per device, or group of cores, by torch's API.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from esper_soa.config.settings import TrainConfig, settings_from_yaml, settings_yaml
from esper_soa.nets.setup import check_threads
from esper_soa.runtime.device import resolve_device, take_device
from esper_soa.runtime.ranks import RANK_TIMEOUT, RankGroup, keep_to_cores
from esper_soa.system.console import KNOWN_ERRORS, safe_streams
from esper_soa.system.errors import RankLostError, SettingError, UserError, check, one_line
from esper_soa.system.files import LOGGER, write_text
from esper_soa.system.plain_files import read_text
from esper_soa.system.signals import (
    SAVE_SIGNAL,
    STOP_SIGNALS,
    Interrupted,
    signal_handlers,
)
from esper_soa.training.files.claims import lock_folder
from esper_soa.training.files.run_folder import RunFolder, rounds_of
from esper_soa.training.files.session import Session, quiet_warnings
from esper_soa.training.loop.callbacks import Callback
from esper_soa.training.loop.trainer import run_in_session
from esper_soa.training.results.final_table import final_accuracy
from esper_soa.training.start.begin import LaunchedRank, launched_rank, resume_start

# Errors of a rank that the launcher raises again, by their name in the file that the rank leaves.
FAULT_KINDS = {kind.__name__: kind for kind in KNOWN_ERRORS}
STOPPED_BY_SIGNAL = "stopped"
# faults that follow from another rank's or the launcher's
CONSEQUENCE_KINDS = (RankLostError.__name__, STOPPED_BY_SIGNAL)
LAUNCHER_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)  # each ends all ranks
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def train_in_session(
    session: Session, cfg: TrainConfig, checkpoint: Path | None, callbacks: Sequence[Callback] = ()
) -> float:
    """Run the whole job on as many ranks as the settings say; returns the final accuracy (percent).

    callbacks: called beside those that the settings ask for. Raises RankLostError where a rank was
    lost for good, with the checkpoint to go on from.
    """
    launched = launched_rank()
    if callbacks and (launched is not None or cfg.ranks > 1):
        raise SettingError("ranks", cfg.ranks, "1 with callbacks, which one process calls")
    if launched is not None:
        return run_rank(
            session, replace(cfg, resume=cfg.resume or "auto"), checkpoint, launched=launched
        )
    if cfg.ranks == 1:
        return final_accuracy(run_in_session(session, cfg, checkpoint, callbacks=callbacks))
    check_devices(cfg.device, cfg.ranks, here=cfg.ranks)
    with TemporaryDirectory(prefix="esper_ranks_") as temporary:
        scratch = Path(temporary).resolve()
        job = {
            "launcher": os.getpid(),
            "folder": str(session.folder.path),
            "checkpoint": str(checkpoint or ""),
            "path": sys.path,
            "settings": settings_yaml(cfg),
            "verbose": session.verbose,
        }
        write_text(scratch / "job.json", json.dumps(job))
        _launch(session.folder, scratch, cfg.ranks, restarts=cfg.restarts, rounds=cfg.rounds)
    written = json.loads(read_text(session.folder.summary))
    return float(written["grown"]["validation_accuracy"])


def _launch(folder: RunFolder, scratch: Path, ranks: int, restarts: int, rounds: int) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(scratch / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(str(scratch)),
        max_restarts=restarts,
        signals_to_handle="",  # torch's handlers would stand in for `react`
    )

    def react(number: int) -> None:
        if number == SAVE_SIGNAL:
            _signal_ranks(scratch, 1, number)
            return
        # a rank that somebody has frozen hears nothing, and all others wait for it
        _signal_ranks(scratch, ranks, signal.SIGCONT)
        raise SignalException(f"signal {number}", signal.Signals(number))

    try:
        with _quiet_launcher(), signal_handlers(react, (SAVE_SIGNAL, *LAUNCHER_SIGNALS)):
            elastic_launch(config, sys.executable)(
                "-m", "esper_soa.training.start.launch", str(scratch)
            )
    except SignalException as stop:
        raise Interrupted(int(stop.sigval), _first_fault(scratch).get("unsaved", "")) from None
    except ChildFailedError as failed:
        hint = resume_hint(folder, rounds)
        fault = _first_fault(scratch)
        raise _failure_of(failed, ranks, restarts, fault=fault, hint=hint) from None


def _signal_ranks(scratch: Path, count: int, number: int) -> None:
    """Send a signal to the first `count` ranks, as far as they have begun."""
    for path in (scratch / f"pid_{rank}" for rank in range(count)):
        with suppress(OSError):
            os.kill(int(path.read_text(encoding="ascii")), number)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    # a log of the launcher says at length what our message says in one line; a server of its own
    # would listen on every interface
    log = logging.getLogger("torch.distributed.elastic")
    before = log.propagate
    handler = logging.NullHandler()
    is_unset = FRESH_STORE not in os.environ
    log.addHandler(handler)
    log.propagate = False
    os.environ.setdefault(FRESH_STORE, "1")
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before
        if is_unset:
            del os.environ[FRESH_STORE]


def _first_fault(scratch: Path) -> dict:
    """The first fault of a rank, one of CONSEQUENCE_KINDS only where alone; empty for none."""
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in scratch.glob("fault_*.json")]
    return min(
        faults, key=lambda fault: (fault["kind"] in CONSEQUENCE_KINDS, fault["time"]), default={}
    )


def _failure_of(
    failed: ChildFailedError, ranks: int, restarts: int, fault: dict, hint: str
) -> Exception:
    kind = fault.get("kind", STOPPED_BY_SIGNAL)
    if kind in FAULT_KINDS and kind not in CONSEQUENCE_KINDS:
        return FAULT_KINDS[kind](fault["words"])
    rank, failure = failed.get_first_failure()
    words = f"rank {rank} of {ranks} was ended by {failure.signal_name()}"
    if kind not in CONSEQUENCE_KINDS:
        words = f"rank {fault['rank']} of {ranks} failed ({fault['words']})"
    elif failure.exitcode >= 0:
        words = f"rank {rank} of {ranks} ended with status {failure.exitcode}"
    again = f" {restarts} restarts were of no avail." if restarts else ""
    words = f"{words}; the others have been ended.{again}"
    return RankLostError(f"{words} {hint}")


def resume_hint(folder: RunFolder, rounds: int) -> str:
    """How to go on with the run in `folder`, in words."""
    checkpoints = folder.checkpoints()
    if not checkpoints:
        return "No round is saved yet; resume=auto with the same run_dir begins again"
    done = f"{checkpoints[-1].name} holds {rounds_of(checkpoints[-1])} of {rounds} rounds."
    return f"{done} Go on with resume={folder.path}"


def check_devices(device: str, ranks: int, here: int) -> None:
    """Raise SettingError where there are fewer GPUs here than ranks of the run, each with one, and
    on a CPU for more ranks than make sense.
    """
    if resolve_device(device).type == "cuda":
        count = torch.cuda.device_count()
        allowed = f"such that a machine has at most {count}, the GPUs of this one"
        remedy = "device=cpu takes the CPU's cores instead."
        check(here <= count, "ranks", ranks, allowed=allowed, remedy=remedy)
    else:
        check_threads("ranks", here)


def main() -> None:
    """Run the rank this process was started for; the argument is the launcher's scratch folder."""
    scratch = Path(sys.argv[1])
    launched = launched_rank()
    assert launched is not None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)  # all ranks are on this machine
    job = json.loads((scratch / "job.json").read_text(encoding="utf-8"))
    sys.path[:] = job["path"]
    threading.Thread(target=_stop_with, args=(job["launcher"],), daemon=True).start()
    rendezvous = f"file://{scratch}/store_{launched.restarts}"
    ending = _end_rank(scratch, launched.rank, job["launcher"])
    with ending, safe_streams(), quiet_warnings():
        cfg = settings_from_yaml(job["settings"])
        write_text(scratch / f"pid_{launched.rank}", str(os.getpid()))
        if launched.rank > 0:
            run_silent_rank(cfg, launched, rendezvous)
            return
        session = Session(RunFolder(Path(job["folder"])), job["verbose"])
        with lock_folder(session.folder, shared=True) as session.claim, session.logging_output():
            checkpoint = Path(job["checkpoint"]) if job["checkpoint"] else None
            if launched.restarts:
                cfg = replace(cfg, resume="auto")
                checkpoint = resume_start("auto", str(session.folder.path), cfg.name).checkpoint
            run_rank(session, cfg, checkpoint, launched=launched, rendezvous=rendezvous)


def _stop_with(launcher: int) -> None:
    """Ask this process to stop, with a checkpoint, once it is no longer a child of `launcher`."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _end_rank(scratch: Path, rank: int, launcher: int) -> Iterator[None]:
    """Write what ends the context early to a file in the launcher's folder, which is removed where
    the launcher is gone; KNOWN_ERRORS end the process by their status.
    """
    path = scratch / f"fault_{rank}.json"
    path.unlink(missing_ok=True)  # left by an earlier start
    try:
        yield
    finally:
        error = sys.exception()
        known = next((name for name, kind in FAULT_KINDS.items() if isinstance(error, kind)), "")
        if error is not None:
            fault = {
                "kind": known or (STOPPED_BY_SIGNAL if isinstance(error, SystemExit) else "error"),
                "rank": rank,
                "words": str(error) if known else f"{type(error).__name__}: {error}",
                "time": time.time(),
                "unsaved": error.unsaved if isinstance(error, Interrupted) else "",
            }
            if scratch.exists():  # another rank removes it once the launcher is gone
                write_text(path, json.dumps(fault))
        if os.getppid() != launcher:
            rmtree(scratch, ignore_errors=True)
        if known:
            sys.exit(2 if isinstance(error, UserError) else 1)


def run_silent_rank(cfg: TrainConfig, launched: LaunchedRank, rendezvous: str = "env://") -> float:
    """`run_rank` for a rank other than the first, which prints and writes nothing."""
    LOGGER.disabled = True
    session = Session(RunFolder(Path(os.devnull)), 0)
    silent_cfg = replace(cfg, report=False, track=[])
    return run_rank(session, silent_cfg, None, launched=launched, rendezvous=rendezvous)


def run_rank(
    session: Session,
    cfg: TrainConfig,
    checkpoint: Path | None,
    launched: LaunchedRank,
    rendezvous: str = "env://",
) -> float:
    """Run this process's rank of a run, from `checkpoint` on; returns the final accuracy (percent).

    rendezvous: where ranks find each other, for torch.distributed. Raises RankLostError where they
    cannot be reached, and, with the checkpoint to go on from, where another does not go on.
    """
    allowed = f"{launched.processes}, the processes that were started"
    check(cfg.ranks == launched.processes, "ranks", cfg.ranks, allowed=allowed)
    check_devices(cfg.device, cfg.ranks, here=launched.local_processes)
    device = resolve_device(cfg.device, launched.local_rank)
    take_device(device)
    if device.type == "cpu":
        keep_to_cores(launched.local_rank, launched.local_processes)
    if launched.restarts:
        message = "ranks    all %d were started again, for the %d. time"
        LOGGER.warning(message, launched.processes, launched.restarts)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, rendezvous, RANK_TIMEOUT, launched.processes, launched.rank
        )
    except RuntimeError as error:
        raise RankLostError(
            f"the other ranks cannot be reached ({one_line(error)}). Give torchrun {FRESH_STORE}=1,"
            " so that ranks started again do not look for those that are gone."
        ) from error
    processes = launched.local_processes if device.type == "cpu" else 1
    group = RankGroup(cfg.envs, launched.local_rank, processes)
    try:
        accuracy = final_accuracy(run_in_session(session, cfg, checkpoint, ranks=group))
        group.gather_values(None)  # nobody leaves before all have come to the end
    except RankLostError as error:
        raise RankLostError(f"{error}. {resume_hint(session.folder, cfg.rounds)}") from error
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
