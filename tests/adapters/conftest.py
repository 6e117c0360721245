"""What the tests of all adapters are given."""

import pytest
from adapter_sizes import Played, play


@pytest.fixture(scope="session")
def played() -> Played:
    return play()
