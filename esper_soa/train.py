"""The command esper-train: `python -m esper_soa.train +experiment=cifar_3seed`.

Nothing imports this module, as Python would then have the name `esper_soa.train` mean it.
"""

from esper_soa.training.start.command import train_command as main

if __name__ == "__main__":
    main()
