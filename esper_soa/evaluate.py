"""The command esper-evaluate: `python -m esper_soa.evaluate checkpoint=RUN policies=[ppo,wait]`."""

from esper_soa.training.start.command import evaluate_command as main

if __name__ == "__main__":
    main()
