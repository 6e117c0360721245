"""Whoever hands over an item never waits, and every item that was not handled is counted."""

import threading
import time

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


def test_a_full_queue_costs_what_does_not_fit_and_no_time() -> None:
    held = threading.Event()
    found = list[int]()

    def wait(item: int) -> None:
        held.wait(10)
        found.append(item)

    worker = Worker[int]("test", wait, limit=3)
    begun = time.monotonic()
    taken = [worker.emit(item) for item in range(100)]
    assert time.monotonic() - begun < 1
    assert 3 <= sum(taken) <= 4, "three wait, and one may be in the thread's hands"
    worker.insist(1000)
    held.set()
    assert worker.flush(10)
    assert found == [item for item, fits in zip(range(100), taken, strict=True) if fits] + [1000]
    assert worker.dropped == 100 - sum(taken)


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
    held = threading.Event()
    worker = Worker[int]("test", lambda item: bool(held.wait(10)), limit=10)
    for item in range(5):
        worker.emit(item)
    assert not worker.flush(0.2)
    assert not worker.close(0.2)
    assert worker.dropped == 4, "one is in the thread's hands"
    held.set()
    assert worker.close(10), "may be repeated"


def test_after_its_end_a_worker_takes_nothing_and_waits_for_nothing() -> None:
    worker = Worker[int]("test", print, limit=10)
    assert worker.close(10)
    assert not worker.emit(1)
    begun = time.monotonic()
    assert not worker.flush(10)
    assert time.monotonic() - begun < 2
    assert worker.dropped == 1
