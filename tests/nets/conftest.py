"""Fixtures of the tests of networks."""

import pytest
import torch

from esper_soa.nets.engines.cpu.proof import choose_native
from esper_soa.nets.engines.torch.engine import TorchEngine

CPU = torch.device("cpu")


@pytest.fixture
def native(_one_thread: None) -> None:
    """Native kernels can be had; skips where there is no compiler."""
    choice = choose_native(CPU, TorchEngine())
    if not choice.native:
        assert (
            "no C compiler" in choice.reason
        )  # a compiler that refuses the sources is a failure, not a skip
        pytest.skip(choice.reason)
