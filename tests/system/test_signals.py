"""Signals at every time: during set-up, twice, and in a process that handles signals itself."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper_soa.system.console import ending_with_status
from esper_soa.system.signals import (
    Interrupted,
    collect_signals,
    import_guard,
    stop_at_once,
)
from tests.builders import warm
from tests.builders.program import (
    ENVIRONMENT,
    PATIENCE,
    TINY,
    contents,
    finished,
    lines,
    started,
    wait_until,
)

LONG = [*TINY, "rounds=5000", "checkpoint_every=0", "control=none", "telemetry.progress=off"]
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def send(*numbers: int) -> None:
    """Send signals to this process; their handlers have run when this returns."""
    for number in numbers:
        os.kill(os.getpid(), number)


@contextmanager
def handled(number: int, handler: object) -> Iterator[None]:
    """`handler` is what this process has for signal `number`, as a launcher would install it."""
    before = signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(number, before)


def test_signals_amid_a_clean_up_change_nothing() -> None:
    cleaned = []

    def work() -> None:
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGINT)
            try:
                raise OSError
            except OSError:
                send(signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(Interrupted) as stop, stop_at_once():
        work()
    assert cleaned
    assert stop.value.number == signal.SIGTERM


def test_what_begins_behind_an_interruption_can_be_interrupted_too() -> None:
    def begin_anew() -> None:
        try:
            send(signal.SIGTERM)
        except Interrupted as error:
            with stop_at_once():
                send(signal.SIGINT)
            raise AssertionError from error

    with pytest.raises(Interrupted) as stop, stop_at_once():
        begin_anew()
    assert stop.value.number == signal.SIGINT


@pytest.mark.parametrize(("number", "status"), STOPS)
def test_a_command_ends_at_once_with_one_line_and_the_status_of_the_signal(
    number: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def pass_over(*_: object) -> None:
        """What another program does."""

    with handled(number, pass_over):
        with pytest.raises(SystemExit) as stop, ending_with_status():
            send(number)
        assert signal.getsignal(number) is pass_over
    assert stop.value.code == status
    assert capsys.readouterr().err == f"stopped by {signal.Signals(number).name}\n"


@pytest.mark.parametrize("number", [*(number for number, _ in STOPS), signal.SIGUSR2])
def test_signals_that_a_process_was_started_to_ignore_stay_ignored(number: int) -> None:
    with handled(number, signal.SIG_IGN):
        with stop_at_once(), import_guard(), collect_signals() as requests:
            send(number)
        assert requests.waiting() == []
        assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [("INT", "INT", 130), ("TERM", "TERM", 143), ("INT", "TERM", 143)],
)
def test_a_second_signal_does_not_wait_and_gives_its_own_status(
    first: str, second: str, status: int
) -> None:
    with collect_signals() as requests:
        send(getattr(signal, f"SIG{first}"))
        assert requests.waiting() == [getattr(signal, f"SIG{first}")]
        with pytest.raises(Interrupted) as stop:
            send(getattr(signal, f"SIG{second}"))
    assert stop.value.code == status


@pytest.mark.parametrize("enabled", [True, False])
def test_modules_are_loaded_without_a_search_for_garbage_which_stays_as_it_was(
    enabled: bool,
) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with import_guard():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


LAUNCHER = """
import os, signal, sys
from pathlib import Path
from esper_soa.config.compose import compose_settings
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.trainer import run_in_session

folder = Path(sys.argv[1])

def bypass(number, frame):
    print("bypassed with", *sorted(path.name for path in folder.glob("checkpoint*")), flush=True)

def requeue(number, frame):
    print("requeued with", *sorted(path.name for path in folder.glob("checkpoint*")), flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, bypass)
signal.signal(signal.SIGUSR2, requeue)
with session(RunFolder(folder)) as opened:
    run_in_session(opened, compose_settings(overrides=sys.argv[2:]), None)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launcher_that_requeues_on_sigusr2_finds_the_checkpoint_and_the_run_goes_on_after(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = warm.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *LONG],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    wait_until(lambda: len(lines(folder / "metrics.jsonl")) >= 1, process)
    process.send_signal(signal.SIGTERM)
    log = folder / "log.txt"
    wait_until(lambda: "SIGTERM: " in log.read_text(), process)
    rounds = len(lines(folder / "metrics.jsonl"))
    wait_until(lambda: len(lines(folder / "metrics.jsonl")) > rounds + 1, process)  # it goes on
    process.send_signal(signal.SIGUSR2)
    told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7
    bypassed, requeued = [
        line.split() for line in told.splitlines() if line.split()[1:2] == ["with"]
    ]
    done = len(lines(folder / "metrics.jsonl"))
    assert bypassed[0] == "bypassed"
    assert len(bypassed) == 3
    assert requeued == ["requeued", "with", bypassed[2], f"checkpoint_{done:06d}.pt"]
    again = finished(*LONG, f"rounds={done + 1}", "run_dir=run", "resume=auto", folder=tmp_path)
    assert again.returncode == 0
    assert len(lines(folder / "metrics.jsonl")) == done + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "status"), STOPS)
def test_two_signals_at_once_leave_a_clean_folder_and_the_status_of_the_signal(
    tmp_path: Path, number: int, status: int
) -> None:
    process = started(*LONG, "run_dir=run", folder=tmp_path)
    wait_until(lambda: bool(lines(tmp_path / "run" / "metrics.jsonl")), process)
    for _ in range(200):
        if process.poll() is None:
            process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert told == f"stopped by {signal.Signals(number).name}\n"
    assert [name for name in contents(tmp_path) if name.endswith(".tmp")] == []
