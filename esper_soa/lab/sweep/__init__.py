"""Sweeps: what becomes of each job, jobs in processes, the table at the end, search by Optuna."""
