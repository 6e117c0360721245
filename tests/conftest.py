"""Puts this folder on the import path, so that tests can share tiny_world.

Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before anything imports Triton. Every
file of tests starts in plain torch, whatever runs of the whole program before it have switched on, and every test with
one thread within an operation, as a run does: more mostly wait for each other, many times as long beside other work.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper_soa.nets.native import switch

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _plain_torch() -> Iterator[None]:
    switch.choose("off", torch.device("cpu"))
    yield
    switch.choose("off", torch.device("cpu"))
