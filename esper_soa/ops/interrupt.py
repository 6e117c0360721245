"""Signals as requests that a run heeds between two env-steps, so that nothing is ever cut in the middle.

SIGINT and SIGTERM ask it to write a checkpoint and stop, SIGUSR2 to write one and go on. Used by the trainer; the
entry point turns `Interrupted` into an exit status. Needs no torch.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAVING = signal.SIGUSR2


class Interrupted(Exception):  # noqa: N818 (what happened, not a fault)
    """A run was asked to stop and has written its checkpoint."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    @property
    def status(self) -> int:
        """The conventional exit status: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


@dataclass
class Requests:
    """What signals have asked for and nobody has done yet."""

    stop: int = 0  # number of the signal; 0 = none
    save: bool = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler; a second request to stop does not wait."""
        if number == SAVING:
            self.save = True
            return
        if self.stop:
            raise KeyboardInterrupt
        self.stop = number


@contextmanager
def signals_noted() -> Iterator[Requests]:
    """Requests that fill while the context lasts; outside the main thread, where no signal comes, they stay empty."""
    requests = Requests()
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    before = {number: signal.signal(number, requests.note) for number in (*STOPPING, SAVING)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
