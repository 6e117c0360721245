"""The loop: worlds and players, tasks of a run, rounds, controls, resuming, evaluation."""
