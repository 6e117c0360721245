"""The processes of a benchmark's opponents as this one: no start, no imports again."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from benchmarks import loops, opponents
from benchmarks.opponents import Layout


class Here:
    """What is asked of a process of its own, done in this one."""

    def submit(self, call: Callable[..., object], *arguments: object) -> Future:
        done: Future = Future()
        done.set_result(call(*arguments))
        return done

    def shutdown(self) -> None:
        """Nothing to end."""


def stay_here(patch: pytest.MonkeyPatch) -> None:
    """One loop at a time in this process, uncompiled, with a short search for its form."""
    patch.setattr(opponents, "layouts", lambda *_: [Layout(1, 1)])
    patch.setattr(opponents, "own_process", Here)
    patch.setattr(loops, "TRIALS", 1)
    patch.setattr("benchmarks.loops.shutil.which", lambda _: None)
