"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy."""

import importlib
from typing import TYPE_CHECKING

from esper_soa.registry import agent, blueprint, reward

if TYPE_CHECKING:
    from esper_soa.conformance import check_agent, check_blueprint, check_reward

__all__ = ["agent", "blueprint", "check_agent", "check_blueprint", "check_reward", "reward"]

# What needs torch, which takes seconds to import, is imported when it is first asked for; by name, its module.
_LATE = dict.fromkeys(("check_agent", "check_blueprint", "check_reward"), "esper_soa.conformance")


def __getattr__(name: str) -> object:
    """A name of _LATE."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(_LATE[name]))[name]
