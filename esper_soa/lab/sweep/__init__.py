"""Sweeps: records of jobs, jobs in processes, the final table, search with Optuna."""
