"""Triton's interpreter changes the functions of its language before every launch and every call of
a device function, and back after a launch: a third of the time of kernels on tiny tensors. Nothing
else uses them in a process of tests, so there they are changed once and stay.
"""

import sys
from types import FunctionType

NAME = "triton.runtime.interpreter"


class Patched:
    """Takes the place of `_patch_lang`; gives itself as what was changed."""

    def __init__(self) -> None:
        self.interpreter = sys.modules[NAME]
        self.patch = self.interpreter._patch_lang
        self.seen = set[tuple[bool, ...]]()

    def __call__(self, function: FunctionType) -> "Patched":
        values = list(function.__globals__.values())
        modules = (self.interpreter.tl, self.interpreter.tl.core)
        visible = tuple(any(one is module for one in values) for module in modules)
        if visible not in self.seen:
            self.seen.add(visible)
            self.patch(function)
        return self

    def restore(self) -> None:
        """Nothing is changed back."""


def patch_language_once() -> None:
    """From here on, where the interpreter is imported by now; may be repeated."""
    if NAME in sys.modules and not isinstance(sys.modules[NAME]._patch_lang, Patched):
        sys.modules[NAME]._patch_lang = Patched()
