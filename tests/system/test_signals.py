"""Signals at every time: during set-up, twice, and in a process that handles signals itself."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from esper_soa.system.console import ending_with_status
from esper_soa.system.errors import UserError
from esper_soa.system.signals import (
    Interrupted,
    Requests,
    collect_signals,
    import_guard,
    stop_at_once,
    torch_import_guard,
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
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
told_what_is_caught = pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the system does not say which signals are handled",
)


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


def test_a_library_that_a_signal_cuts_short_may_raise_what_it_likes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compose() -> None:
        try:
            send(signal.SIGINT)
        except SystemExit as error:
            raise UnboundLocalError("of a clean-up") from error

    with pytest.raises(Interrupted), stop_at_once():
        compose()
    assert capsys.readouterr().err == "stopped by SIGINT\n"
    with pytest.raises(UnboundLocalError), stop_at_once():
        raise UnboundLocalError("of its own")


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


def test_what_could_not_be_saved_makes_a_stop_a_failure() -> None:
    assert Interrupted(signal.SIGTERM).code == 143
    stop = Interrupted(signal.SIGTERM, "the newest checkpoint could not be written (disk full)")
    assert stop.code == 1
    assert str(stop) == "stopped by SIGTERM; the newest checkpoint could not be written (disk full)"


def test_a_handler_of_another_program_is_called_once_the_request_is_heeded() -> None:
    called: list[int] = []

    def of_the_launcher(number: int, frame: FrameType | None) -> None:
        called.append(number)

    with handled(signal.SIGUSR2, of_the_launcher), handled(signal.SIGTERM, of_the_launcher):
        with collect_signals() as requests:
            # twice is no hurry: the launcher decides
            send(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR2)
            assert requests.waiting() == [signal.SIGUSR2, signal.SIGTERM]
            assert called == []
            assert requests.handle(signal.SIGUSR2)
            assert requests.handle(signal.SIGTERM)
            assert requests.waiting() == []
            assert called == [signal.SIGUSR2, signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is of_the_launcher
        with import_guard():
            send(signal.SIGTERM)
        assert called[2:] == [signal.SIGTERM]


def test_without_such_a_handler_there_is_nobody_to_call() -> None:
    with (
        handled(signal.SIGTERM, signal.SIG_DFL),
        handled(signal.SIGUSR2, signal.SIG_IGN),
        collect_signals() as requests,
    ):
        send(signal.SIGTERM, signal.SIGUSR2)
        assert not requests.handle(signal.SIGTERM)
        assert not requests.handle(signal.SIGUSR2)
    with stop_at_once(), collect_signals() as requests:  # the entry point's handlers are our own
        send(signal.SIGTERM)
        assert not requests.handle(signal.SIGTERM)


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


AMID = """
import os, sys
from esper_soa.system.signals import import_guard
try:
    with import_guard():
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
        except BaseException:
            print("it goes on")
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(("number", "status"), STOPS)
def test_amid_an_import_a_signal_ends_the_process_whatever_a_module_catches(
    number: int, status: int
) -> None:
    asked = [sys.executable, "-c", AMID, str(int(number))]
    done = warm.run(asked, capture_output=True, text=True, timeout=PATIENCE)
    told = f"stopped by {signal.Signals(number).name}\n"
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_torch_that_has_no_room_for_its_files_is_a_mistake_with_a_remedy() -> None:
    with pytest.raises(UserError) as caught, torch_import_guard():
        raise OSError(28, "No space left on device")
    problem = "torch cannot be loaded ([Errno 28] No space left on device)"
    assert str(caught.value) == f"{problem}. TMPDIR=<folder> names one for its files"


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[Requests] = []

    def work() -> None:
        with collect_signals() as requests:
            found.append(requests)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(requests.before, requests.waiting()) for requests in found] == [({}, [])]


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


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Whether the process has a handler for the signal, as the system sees it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def interrupted(folder: Path, number: int, delay: float) -> tuple[int, str]:
    """Status and complaints of a run that gets a signal `delay` seconds after it can hear it."""
    process = started(*LONG, "run_dir=run", folder=folder)
    wait_until(lambda: catches(process, signal.SIGTERM), process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=delay)
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    return process.returncode, told


@told_what_is_caught
@pytest.mark.parametrize(("number", "status"), STOPS)
def test_a_signal_in_the_first_moment_ends_with_one_line(
    tmp_path: Path, number: int, status: int
) -> None:
    assert interrupted(tmp_path, number, 0.01) == (
        status,
        f"stopped by {signal.Signals(number).name}\n",
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
@told_what_is_caught
def test_a_signal_at_any_moment_of_set_up_ends_with_one_line(tmp_path: Path) -> None:
    chance = random.Random(3)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        number, status = STOPS[attempt % 2]
        delay = chance.uniform(0, 6)
        found = interrupted(folder, number, delay)
        assert found == (status, f"stopped by {signal.Signals(number).name}\n"), delay
        assert list(folder.rglob("*.tmp")) == []


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "status"), STOPS)
def test_an_evaluation_that_is_stopped_ends_at_once_with_one_line(
    tmp_path: Path, number: int, status: int
) -> None:
    assert (
        finished(*TINY, "rounds=1", "control=none", "run_dir=run", folder=tmp_path).returncode == 0
    )
    asked = ("checkpoint=run", "run_dir=judged", "episodes=50000", "policies=[wait]")
    process = started(*asked, "compute.engine=torch", folder=tmp_path, program="evaluate")
    wait_until(lambda: (tmp_path / "judged" / "versions.json").exists(), process)
    process.send_signal(number)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert told == f"stopped by {signal.Signals(number).name}\n"
    assert [name for name in contents(tmp_path) if name.endswith(".tmp")] == []
