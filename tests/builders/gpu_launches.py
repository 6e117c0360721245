"""Counts what an env-step launches on a GPU, without one: kernels of Triton by name, torch's
operations by dispatch.

What a StepCache keeps counts as the one replay that it is, and what lies within it apart.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import JITFunction, interpreter

from benchmarks.sync_guard import SyncGuard
from esper_soa.nets.graphs import CapturedCall, StepCache

TENSORS = 64  # of a launch that copies lists of tensors (torch's multi_tensor_apply)
NO_LAUNCH = ("empty", "detach", "alias")
REPLAY = "replay"


class Within(NamedTuple):
    """A step that was replayed."""

    name: str
    kernels: Counter[str]  # launches within it, by name

    @property
    def launches(self) -> int:
        """All within it."""
        return self.kernels.total()


class Launches(TorchDispatchMode):
    """Counts kernels, which are not run, and torch's operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.steps: list[Within] = []

    def __torch_dispatch__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name.startswith("_foreach"):
            self.counts[name] += -(-len(args[0]) // TENSORS)
        elif not (name.startswith(NO_LAUNCH) or function.is_view):
            self.counts[name] += 1
        return result

    def take(self) -> int:
        """All since the last call."""
        found = self.counts.total()
        self.counts.clear()
        return found


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Within it launches are counted, and kernels of Triton are not run."""
    with Launches() as launches, monkeypatch.context() as patched:
        patched.setattr(
            interpreter.InterpretedFunction if knobs.runtime.interpret else JITFunction,
            "run",
            lambda self, *args, **options: launches.counts.update([self.fn.__name__]),
        )
        yield launches


class Watched(StepCache):
    """Counts every step as a replay, and lets none wait for the device or move a buffer."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(capture=False)
        self.launches = launches

    def advance_(self, kept: object, variant: int) -> None:
        step = kept.step  # type: ignore[attr-defined]
        counts = self.launches.counts
        places = [buffer.data_ptr() for buffer in step.buffers()]
        before = counts.copy()
        with SyncGuard():
            super().advance_(kept, variant)  # type: ignore[arg-type]
        assert [buffer.data_ptr() for buffer in step.buffers()] == places
        self.launches.steps.append(Within(_name(step), counts - before))
        counts.clear()
        counts.update(before)
        counts[REPLAY] += 1


def _name(step: object) -> str:
    if not isinstance(step, CapturedCall):
        return type(step).__name__
    function = step.function.func if isinstance(step.function, partial) else step.function
    return function.__name__.strip("_")
