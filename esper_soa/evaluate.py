"""The command line of evaluations: `python -m esper_soa.evaluate checkpoint=RUN
policies=[ppo,heuristic,wait]`.

Stands in front of command.py, as train.py does.
"""

from esper_soa.config.arguments import show_help_or_version
from esper_soa.runtime.console import standing_streams
from esper_soa.runtime.signals import importing, stopped_at_once


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    with standing_streams(), stopped_at_once():
        if show_help_or_version("evaluate"):
            return
        with importing():
            from esper_soa.training.command import EvaluateConfig, run_command

        run_command("evaluate", EvaluateConfig)


if __name__ == "__main__":
    main()
