"""The command esper-train: `python -m esper_soa.train +experiment=cifar_3seed`.

Once it is imported, Python has the name `esper_soa.train` mean this module, so the module can be
called as that function.
"""

from esper_soa.runtime.console import make_callable
from esper_soa.training.command import run_command


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    run_command("train")


if __name__ == "__main__":
    main()
else:
    make_callable(__name__, "esper_soa.training.runs", "train")
