"""Signals: what stops a program that is setting up, and what a run handles between two env-steps.

While a program sets up, SIGINT, SIGTERM and SIGHUP end it at once. While rounds are played they ask
for a checkpoint and the end, and SIGUSR2 for a checkpoint alone, so that nothing is ever cut in the
middle. A handler that another program had installed in this process before, as launchers on Slurm
do, is called after the checkpoint, and decides whether the run goes on. Signals that the process
was started to ignore, as nohup does with SIGHUP, stay ignored. No torch, no Hydra.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from esper_soa.system.cores import let_threads_sleep
from esper_soa.system.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR2
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


class Interrupted(SystemExit):
    """A program was asked to stop; ends the interpreter with 128 and the number of the signal.

    `unsaved` says what could not be saved before, which makes a failure of it.
    """

    def __init__(self, number: int, unsaved_text: str = "") -> None:
        self.number = number
        self.unsaved = unsaved_text
        self.status = 1 if unsaved_text else 128 + number
        super().__init__(self.status)

    def __reduce__(self) -> tuple:
        return type(self), (self.number, self.unsaved)

    def __str__(self) -> str:
        unsaved = f"; {self.unsaved}" if self.unsaved else ""
        return f"stopped by {signal.Signals(self.number).name}{unsaved}"


def is_foreign(handler: Handler) -> bool:
    """Whether `handler` is a function that another program in this process has installed."""
    known = callable(handler) and handler is not signal.default_int_handler
    return known and handler.__module__ != __name__


def is_ending(outer: BaseException | None) -> bool:
    """Whether an Interrupted is being handled here, or an error behind one, inside of `outer`."""
    error = sys.exception()
    while error is not outer and error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not outer and error is not None


def not_ignored(numbers: tuple[signal.Signals, ...]) -> tuple[signal.Signals, ...]:
    """Those of the signals that this process does not ignore."""
    return tuple(one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN)


@contextmanager
def signal_handlers(
    react: Callable[[int], None], numbers: tuple[signal.Signals, ...]
) -> Iterator[dict[int, Handler]]:
    """`react` to signals in the context, in the main thread; yields the handlers from before.

    Signals that are ignored stay so. Those that come amid the clean-up after an Interrupted of the
    context change nothing.
    """
    outer = sys.exception()

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_ending(outer):
            react(number)

    before: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handle) for number in not_ignored(numbers)}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextmanager
def stop_at_once() -> Iterator[None]:
    """In the context, STOP_SIGNALS raise Interrupted, whatever libraries make of it."""
    requests = list[Interrupted]()

    def stop(number: int) -> None:
        requests.append(Interrupted(number))
        raise requests[0]

    try:
        with signal_handlers(stop, STOP_SIGNALS):
            yield
    except Interrupted as error:
        print(error, file=sys.stderr)
        raise
    except Exception as error:
        # a clean-up that the signal has cut short
        if not requests:
            raise
        print(requests[0], file=sys.stderr)
        raise requests[0] from error


@contextmanager
def import_guard() -> Iterator[None]:
    """STOP_SIGNALS end the process amid an import, where exceptions get lost or changed.

    Handlers of other programs stay in place. No garbage is looked for meanwhile: what is imported
    stays, and the search takes a sixth of the time.
    """

    def leave(number: int) -> None:
        stop = Interrupted(number)
        print(stop, file=sys.stderr)
        os._exit(stop.status)

    handled = tuple(number for number in STOP_SIGNALS if not is_foreign(signal.getsignal(number)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        with signal_handlers(leave, handled):
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def torch_import_guard() -> Iterator[None]:
    """`import_guard` for torch; UserError where there is no room for the files that it makes."""
    let_threads_sleep()
    try:
        with import_guard():
            yield
    except OSError as error:
        remedy = "TMPDIR=<folder> names one for its files"
        raise UserError(f"torch cannot be loaded ({error}). {remedy}") from error


class Requests:
    """Pending requests by signals."""

    def __init__(self) -> None:
        self.stop = 0  # number of the signal; 0 = none
        self.save = False
        self.before: dict[int, Handler] = {}  # handlers that these requests stand in for

    def note(self, number: int) -> None:
        """React to a signal; a second request to stop does not wait, unless others handle it."""
        if number == SAVE_SIGNAL:
            self.save = True
        elif self.stop and not is_foreign(self.before.get(number)):
            raise Interrupted(number)
        else:
            self.stop = number

    def waiting(self) -> list[int]:
        """The signals that wait, the one that asks for the end last."""
        return [int(SAVE_SIGNAL)] * self.save + [self.stop] * bool(self.stop)

    def handle(self, number: int) -> bool:
        """After the checkpoint: call another program's handler; returns whether there was one."""
        if number == SAVE_SIGNAL:
            self.save = False
        else:
            self.stop = 0
        handler = self.before.get(number)
        if callable(handler) and is_foreign(handler):
            handler(number, None)
            return True
        return False


@contextmanager
def collect_signals() -> Iterator[Requests]:
    """Requests that fill while the context lasts; outside the main thread they stay empty."""
    requests = Requests()
    with signal_handlers(requests.note, (*STOP_SIGNALS, SAVE_SIGNAL)) as before:
        requests.before = before
        yield requests
