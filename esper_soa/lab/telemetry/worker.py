"""A background thread with a bounded queue, which counts dropped items. The writer of tables and
every tracker have one each. Needs no torch.
"""

import threading
import traceback
from collections.abc import Callable
from queue import Queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Failures:
    """Context that counts exceptions and suppresses them, for optional parts of a run."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""  # of the last one: what it was, and where it came from
        self.trace = ""

    def __enter__(self) -> "Failures":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.count += 1
        self.last = f"{type(error).__name__}: {error}"
        self.trace = "".join(traceback.format_exception(error))
        return True


class Worker(Generic[Item]):
    """Calls `handle` with each item in a thread of its own, which the first item starts."""

    def __init__(self, name: str, handle: Callable[[Item], None], limit: int) -> None:
        """limit: items that may wait; name: of the thread."""
        self._handle = handle
        self._limit = limit
        self._queue = Queue[Item | None]()  # None: no more will come
        self._failures = Failures()
        self._lost = 0  # items that were not handed to the thread, or left at the end
        self._gone = False  # whether the thread is
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def dropped(self) -> int:
        """Items that found the queue full, that failed, or that were left at the end."""
        return self._lost + self._failures.count

    @property
    def reason(self) -> str:
        """The error of the last item that failed; empty where none did."""
        return self._failures.last

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return self._queue.empty()

    def emit(self, item: Item) -> bool:
        """Hand over an item, at once; False where dropped: too many wait, or the thread is gone."""
        fits = self._queue.qsize() < self._limit and not self._gone
        if fits:
            self.insist(item)
        else:
            self._lost += 1
        return fits

    def insist(self, item: Item | None) -> None:
        """Hand over an item, at once, however many wait; the first starts the thread."""
        if self._thread.ident is None:
            self._thread.start()
        self._queue.put(item)

    def flush(self, seconds: float) -> bool:
        """Wait until all items are done, at most for the timeout; returns whether they are."""
        self._wait(lambda: self._gone or not self._queue.unfinished_tasks, seconds)
        return not self._queue.unfinished_tasks

    def close(self, seconds: float) -> bool:
        """Let the thread end once all is done, and wait for that, but not longer; what is left is
        dropped. May be repeated; returns whether it has ended.
        """
        self.insist(None)
        self._wait(lambda: self._gone, seconds)
        ended = self._gone
        while not self._queue.empty():
            self._lost += self._queue.get() is not None
        if not ended:
            self._queue.put(None)
        return ended

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(over, seconds)

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                with self._failures:
                    self._handle(item)
                self._queue.task_done()
        finally:
            with self._queue.all_tasks_done:
                self._gone = True
                self._queue.all_tasks_done.notify_all()
