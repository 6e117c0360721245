"""Which cases of a test are in the default lane, and which in the slow one."""

from collections.abc import Iterable

import pytest


def some_of(cases: Iterable[str], *default: str) -> list:
    """All cases for `parametrize`, marked slow but for those in `default`."""
    return [pytest.param(one, marks=() if one in default else pytest.mark.slow) for one in cases]
