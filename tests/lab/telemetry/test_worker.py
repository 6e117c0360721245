"""Whoever hands over an item never waits, and every item that was not handled is counted."""

import re
import sys
import threading
from collections.abc import Iterator

import pytest

from esper_soa.lab.telemetry.worker import Worker
from tests.builders.program import wait_until


class Held:
    """Handles items once it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.found = list[int]()

    def __call__(self, item: int) -> None:
        self.begun.set()
        self.go.wait(60)
        self.found.append(item)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.go.set()


def test_items_are_handled_in_order_in_another_thread_and_those_that_fail_are_counted() -> None:
    found: list[tuple[int, int]] = []
    worker = Worker[int]("test", lambda item: found.append((6 // item, threading.get_ident())), 100)
    assert all(worker.emit(item) for item in (1, 2, 0, 3))
    assert worker.flush(10)
    assert [item for item, _ in found] == [6, 3, 2]
    assert threading.get_ident() not in {thread for _, thread in found}
    assert worker.close(10)
    assert worker.dropped == 1
    assert re.fullmatch("ZeroDivisionError: .*by zero", worker.reason)


def test_a_full_queue_costs_what_does_not_fit_and_waits_for_nothing(held: Held) -> None:
    worker = Worker[int]("test", held, limit=3)
    assert worker.emit(0)
    assert held.begun.wait(60)
    assert [worker.emit(item) for item in range(1, 100)] == [True] * 3 + [False] * 96
    worker.insist(1000)
    assert not held.go.is_set(), "whoever hands over waited for the thread"
    held.go.set()
    assert worker.flush(60)
    assert (held.found, worker.dropped) == ([0, 1, 2, 3, 1000], 96)


def test_what_is_left_when_the_time_is_over_is_dropped(held: Held) -> None:
    worker = Worker[int]("left", held, limit=10)
    for item in range(5):
        worker.emit(item)
    assert held.begun.wait(60)
    (thread,) = (one for one in threading.enumerate() if one.name == "left")
    assert thread.daemon, "a process would not end before it"
    assert not worker.flush(0)
    assert not worker.close(0)
    assert worker.dropped == 4, "one is in the thread's hands"
    held.go.set()
    wait_until(lambda: not thread.is_alive())
    assert worker.close(60), "may be repeated"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("ends", ["closed", "by what it calls"])
def test_after_its_end_a_worker_takes_nothing_and_is_not_waited_for(ends: str) -> None:
    worker = Worker[int]("test", lambda item: sys.exit(), limit=10)
    if ends == "closed":
        assert worker.close(60)
    else:
        worker.emit(1)
    worker.insist(2)
    assert not worker.flush(threading.TIMEOUT_MAX)
    assert not worker.emit(3)
    assert worker.close(60)
    assert worker.dropped == 2, "and one more was in the hands of a thread that was ended"
