"""The decision makers: the recurrent PPO policy and the scripted ones. `esper_soa.agent` also marks
users' own.

The package and the mark have one name, so it can be called as the mark is; see registry.py.
"""

import sys
from types import ModuleType

from esper_soa.config import registry


class _Package(ModuleType):
    """This package."""

    def __call__(self, name: str) -> registry.Mark:
        """What `registry.agent` gives."""
        return registry.agent(name)


sys.modules[__name__].__class__ = _Package
