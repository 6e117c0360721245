"""What every test is given.

Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before anything
imports Triton. Every test has one thread within an operation, as a run does: more mostly wait for
each other, many times as long beside other work.
"""

import fcntl
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.builders.triton_once import patch_language_once
from tests.slow_tests import Stopwatch, in_part, listed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# ignored in what a shell starts in the background, or by nohup; tests send them
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """See tests/slow_tests.py."""
    parser.addoption("--part", default="1/1", help="K/M: the K-th of M parts of the tests")
    parser.addoption("--cpu-times", type=Path, help="file for processor seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Have every test timed where a file for that is given."""
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(Stopwatch(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes long, and leave out what is in no part that was asked for."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.listed)
    part = config.getoption("--part")
    left_out = [item for item in items if not in_part(item.nodeid, part)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if in_part(item.nodeid, part)]


def pytest_collection_finish() -> None:
    """Searches for garbage, a tenth of the time, pass over what is imported, and are fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_compiler_beside_tests() -> Iterator[None]:
    """Runs compile no step kernels beside themselves, as long as any process of tests is there: all
    of them hold the lock that a run needs alone to start a compiler. A test with a cache of its own
    plays fewer env-steps than have any compiled.
    """
    from esper_soa.runtime.step_cache import QUIET, STEP_FOLDER
    from esper_soa.system.caches import open_cache

    with open(open_cache(STEP_FOLDER) / f"lock{QUIET}", "w") as lock:
        with suppress(BlockingIOError):  # a run looks just now
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@pytest.fixture(autouse=True)
def _one_patch() -> None:
    patch_language_once()


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """Where the GPU's kernels are tested: on a GPU, or by the interpreter on a CPU; products of
    float32 are exact, as long as a test says nothing else.
    """
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision  # type: ignore[attr-defined]
    conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    yield torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    conv.fp32_precision = before  # type: ignore[attr-defined]


@pytest.fixture
def native(_one_thread: None) -> None:
    """Native kernels can be had; skips where there is no compiler."""
    from esper_soa.nets.engines.cpu.proof import choose_native
    from esper_soa.nets.engines.torch.engine import TorchEngine

    choice = choose_native(torch.device("cpu"), TorchEngine())
    if not choice.native:
        # a compiler that refuses the sources is a failure, not a skip
        assert "no C compiler" in choice.reason
        pytest.skip(choice.reason)
