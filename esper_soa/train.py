"""The command line of training: `python -m esper_soa.train +experiment=cifar_3seed`, or `esper-train`.

Stands in front of command.py, so that a signal is heard while Hydra, which takes half a second, is still imported.
"""

from pathlib import Path

from esper_soa.ops.console import standing_streams
from esper_soa.ops.interrupt import importing, stopped_at_once


def config_dir() -> str:
    """The folder of the configuration files: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return str(packaged if packaged.is_dir() else package.parent / "configs")


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    with standing_streams(), stopped_at_once():
        with importing():
            from esper_soa.command import Command, TrainConfig, play_training

        Command(play_training, TrainConfig).run(config_dir(), "train")


if __name__ == "__main__":
    main()
