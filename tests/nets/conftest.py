"""Fixtures of the tests of networks."""

from collections.abc import Iterator

import pytest
import torch

from esper_soa.nets.engines.cpu import switch

CPU = torch.device("cpu")


@pytest.fixture
def native(_one_thread: None) -> Iterator[None]:
    """Native kernels on, and plain torch afterwards; skips where there is no compiler."""
    choice = switch.choose("auto", CPU)
    if not choice.native:
        assert "no C compiler" in choice.reason  # a compiler that refuses the sources is a failure, not a skip
        pytest.skip(choice.reason)
    yield
    switch.choose("off", CPU)
