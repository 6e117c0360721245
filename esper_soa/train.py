"""The command esper-train: `python -m esper_soa.train +experiment=cifar_3seed`.

Once it is imported, Python has the name `esper_soa.train` mean this module, so the module can be
called as that function.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from esper_soa.training.command import run_command

if TYPE_CHECKING:
    from esper_soa.training.runs import RecordedRun


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    run_command("train")


class CallableModule(ModuleType):
    """This module, which is called for runs.train."""

    def __call__(self, *arguments: object, **options: object) -> "RecordedRun":
        """See runs.train."""
        from esper_soa.training.runs import train

        return train(*arguments, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
else:
    sys.modules[__name__].__class__ = CallableModule
