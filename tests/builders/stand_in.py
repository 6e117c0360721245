"""Stands in for what makes CUDA graphs in torch.cuda, where there is no GPU: captures run, replays
do nothing.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

EMPTY = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured "
    "on wrong device"
)


class Graph:
    """In place of torch.cuda.CUDAGraph; words: what it warns of at the end of a capture."""

    def __init__(self, happened: list[str], words: str) -> None:
        self.happened = happened
        self.words = words

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        self.happened.append(f"begin {capture_error_mode} in {pool}")

    def capture_end(self) -> None:
        self.happened.append("end")
        if self.words:
            warnings.warn(self.words, stacklevel=1)

    def replay(self) -> None:
        self.happened.append("replay")


def stand_in(monkeypatch: pytest.MonkeyPatch, words: str = "") -> list[str]:
    """From here on what is asked of torch.cuda goes into the list, in order; every capture warns of
    `words`.
    """
    asked: list[str] = []

    @contextmanager
    def noted(what: object) -> Iterator[None]:
        asked.append(f"enter {what}")
        yield
        asked.append(f"leave {what}")

    monkeypatch.setattr(torch.cuda, "device", noted)
    monkeypatch.setattr(torch.cuda, "stream", noted)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: pytest.fail("the cache of the allocator was given back")
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(asked, words))
    return asked
