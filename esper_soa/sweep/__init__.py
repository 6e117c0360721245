"""Sweeps: what becomes of each job, jobs in processes of their own, the table at the end, and a
search by Optuna.
"""
