"""Whoever hands over an item never waits, and every item that was not handled is counted."""

import sys
import threading

import pytest

from esper_soa.telemetry.worker import Worker


def test_items_are_handled_in_order_in_another_thread() -> None:
    found: list[tuple[int, int]] = []
    worker = Worker[int](
        "test", lambda item: found.append((item, threading.get_ident())), limit=100
    )
    assert all(worker.emit(item) for item in range(50))
    assert worker.flush(10)
    assert [item for item, _ in found] == list(range(50))
    assert {thread for _, thread in found} != {threading.get_ident()}
    assert worker.close(10)
    assert worker.dropped == 0


def test_a_full_queue_costs_what_does_not_fit_and_waits_for_nothing() -> None:
    begun = threading.Event()
    held = threading.Event()
    found = list[int]()

    def wait(item: int) -> None:
        begun.set()
        held.wait(60)
        found.append(item)

    worker = Worker[int]("test", wait, limit=3)
    assert worker.emit(0)
    assert begun.wait(60)
    assert [worker.emit(item) for item in range(1, 100)] == [True] * 3 + [False] * 96
    worker.insist(1000)
    assert not held.is_set(), "whoever hands over waited for the thread"
    held.set()
    assert worker.flush(60)
    assert found == [0, 1, 2, 3, 1000]
    assert worker.dropped == 96


def test_an_item_that_fails_is_counted_and_the_next_is_handled() -> None:
    found: list[int] = []

    def fail(item: int) -> None:
        found.append(1 // item)

    worker = Worker[int]("test", fail, limit=10)
    for item in (1, 0, 1):
        worker.emit(item)
    assert worker.close(10)
    assert found == [1, 1]
    assert (worker.dropped, worker.reason) == (
        1,
        "ZeroDivisionError: integer division or modulo by zero",
    )


def test_what_is_left_when_the_time_is_over_is_dropped() -> None:
    begun = threading.Event()
    held = threading.Event()

    def wait(item: int) -> None:
        begun.set()
        held.wait(60)

    worker = Worker[int]("test", wait, limit=10)
    for item in range(5):
        worker.emit(item)
    assert begun.wait(60)
    assert not worker.flush(0)
    assert not worker.close(0)
    assert worker.dropped == 4, "one is in the thread's hands"
    held.set()
    assert worker.close(60), "may be repeated"


def test_after_its_end_a_worker_takes_nothing_and_waits_for_nothing() -> None:
    worker = Worker[int]("test", print, limit=10)
    assert worker.close(60)
    assert not worker.emit(1)
    worker.insist(2)
    assert not worker.flush(threading.TIMEOUT_MAX)
    assert worker.dropped == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_ended_by_what_it_calls_is_not_waited_for() -> None:
    worker = Worker[int]("test", lambda item: sys.exit(), limit=10)
    worker.emit(1)
    worker.insist(2)
    assert not worker.flush(threading.TIMEOUT_MAX)
    assert not worker.emit(3)
    assert worker.close(60)
    assert worker.dropped == 2, "one more was in its hands"
