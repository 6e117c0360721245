"""How a run begins: commands, jobs of Hydra, ranks, and the runs of a Python program."""
