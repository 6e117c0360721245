"""What the tests of all adapters are given, of images and of text."""

import pytest

from tests.builders.adapter_sizes import IMAGES, TEXT, Case, Played, play


@pytest.fixture(scope="session", params=[IMAGES, TEXT], ids=["images", "text"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="session")
def played(case: Case) -> Played:
    return play(case)
