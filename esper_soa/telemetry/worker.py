"""A thread that does small jobs in order, for whoever must not wait: a bounded queue, and what was
dropped from it.

The writer of tables and every tracker have one of their own, so that none waits for another. Needs
no torch.
"""

import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
LOOK = 0.1  # seconds between two looks at whether the thread is still there


class Failures:
    """Counts what is raised in its context and lets whoever made it go on.

    For what a run can do without: what a library of others may raise is not known, and none of it
    may end a run.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = ""  # of the last one: what it was, and where it came from
        self.trace = ""

    def __enter__(self) -> "Failures":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.count += 1
        self.last = f"{type(error).__name__}: {error}"
        self.trace = "".join(traceback.format_exception(error))
        return True


class Worker(Generic[Item]):
    """Calls `handle` with each item in a thread of its own."""

    def __init__(self, name: str, handle: Callable[[Item], None], limit: int) -> None:
        """limit: items that may wait; name: of the thread."""
        self._handle = handle
        self._limit = limit
        self._queue: SimpleQueue[tuple[Item] | threading.Event | None] = SimpleQueue()
        self._failures = Failures()
        self._refused = self._abandoned = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items that found the queue full, that failed, or that were left at the end."""
        return self._refused + self._failures.count + self._abandoned

    @property
    def reason(self) -> str:
        """What the last item that failed raised; empty where none did."""
        return self._failures.last

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return self._queue.empty()

    def emit(self, item: Item) -> bool:
        """Hand over an item, at once; False where it was dropped, as too many wait or the thread is
        gone.
        """
        fits = self._queue.qsize() < self._limit and self._thread.is_alive()
        if fits:
            self._queue.put((item,))
        else:
            self._refused += 1
        return fits

    def insist(self, item: Item) -> None:
        """Hand over an item, at once, however many wait."""
        self._queue.put((item,))

    def flush(self, seconds: float) -> bool:
        """Wait until all items so far are done, but not longer; returns whether they are."""
        done = threading.Event()
        self._queue.put(done)
        return self._awaited(done.wait, seconds)

    def close(self, seconds: float) -> bool:
        """Let the thread end once all is done, and wait for that, but not longer; what is left is
        dropped.

        May be repeated; returns whether it has ended.
        """
        self._queue.put(None)
        self._awaited(self._ended, seconds)
        ended = not self._thread.is_alive()
        while not self._queue.empty():
            self._abandoned += isinstance(self._queue.get(), tuple)
        return ended

    def _ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _awaited(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Whether `wait` came true within `seconds`, while the thread was there."""
        end = time.monotonic() + seconds
        while not wait(LOOK):
            if time.monotonic() > end or not self._thread.is_alive():
                return wait(0.0)
        return True

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            with self._failures:
                self._handle(item[0])
