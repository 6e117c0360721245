"""The command line of evaluations: `python -m esper_soa.evaluate checkpoint=RUN
policies=[ppo,heuristic,wait]`.

Stands in front of command.py, as train.py does.
"""

from esper_soa.ops.console import standing_streams
from esper_soa.ops.interrupt import importing, stopped_at_once
from esper_soa.paths import config_dir


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    with standing_streams(), stopped_at_once():
        with importing():
            from esper_soa.command import EVALUATION, Command, EvaluateConfig

        Command(EVALUATION, EvaluateConfig).run(config_dir(), "evaluate")


if __name__ == "__main__":
    main()
