"""Tests that take long by measurement: those that tests/slow_tests.txt names are of the slow lane.

    pytest --cpu-times=times.txt
    python -m tests.slow_tests times.txt

The first command writes processor seconds for each test, the second adds those above the limit to
the list. `pytest -m listed --part=3/6` plays the third of six parts of the list.
"""

import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow_tests.txt")
LIMIT_SECONDS = 1.2  # of a processor, for the call of a test in the default lane
# Recordings of the reference and rules of style are there whatever they take.
NEVER_SLOW = ("tests/test_parity.py", "tests/test_house_style.py")


def listed() -> set[str]:
    """Ids of the tests of the list."""
    return set(LIST.read_text(encoding="utf-8").splitlines())


def in_part(test: str, part: str) -> bool:
    """Whether the test of this id is in the part K/M, K from 1 to M."""
    number, parts = map(int, part.split("/"))
    return zlib.crc32(test.encode()) % parts == number - 1


def processor_seconds() -> float:
    """Seconds of the processor that this process has used, and its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Stopwatch:
    """A plugin that appends seconds and id of every test to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Times the call, without what its fixtures set up."""
        before = processor_seconds()
        yield
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{processor_seconds() - before:.3f} {item.nodeid}\n")


def main() -> None:
    """Add the tests above the limit to the list."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    times = {test: float(seconds) for seconds, test in (line.split(" ", 1) for line in lines)}
    long = {
        test
        for test, seconds in times.items()
        if seconds > LIMIT_SECONDS and not test.startswith(NEVER_SLOW)
    }
    LIST.write_text("".join(f"{test}\n" for test in sorted(long | listed())), encoding="utf-8")


if __name__ == "__main__":
    main()
