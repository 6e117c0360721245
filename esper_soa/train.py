"""The command line of training: `python -m esper_soa.train +experiment=cifar_3seed`, or
`esper-train`.

Stands in front of command.py, so that a signal is heard while Hydra, which takes half a second, is
still imported. Once it is imported, Python has the name `esper_soa.train` mean this module, so it
can be called as that function.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from esper_soa.config.arguments import show_help_or_version
from esper_soa.runtime.console import standing_streams
from esper_soa.runtime.signals import importing, stopped_at_once

if TYPE_CHECKING:
    from esper_soa.training.runs import RecordedRun


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    with standing_streams(), stopped_at_once():
        if show_help_or_version("train"):
            return
        with importing():
            from esper_soa.training.command import TrainConfig, run_command

        run_command("train", TrainConfig)


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
