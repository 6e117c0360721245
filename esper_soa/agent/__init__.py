"""The decision makers: the recurrent PPO policy and the scripted ones.

The package is also the mark of users' own agents, so it can be called; see registry.py.
"""

import sys
from types import ModuleType

from esper_soa.config import registry


class _Package(ModuleType):
    """The package as a callable, so that `esper_soa.agent` is also the decorator."""

    def __call__(self, name: str) -> registry.Mark:
        """Mark a function or class as an agent; see `registry.agent`."""
        return registry.agent(name)


sys.modules[__name__].__class__ = _Package
