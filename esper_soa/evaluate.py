"""The command esper-evaluate: `python -m esper_soa.evaluate checkpoint=RUN policies=[ppo,wait]`."""

from esper_soa.training.command import run_command


def main() -> None:
    """Run the command line; ends the interpreter with the status that command.py documents."""
    run_command("evaluate")


if __name__ == "__main__":
    main()
