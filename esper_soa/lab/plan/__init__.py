"""Estimates of a run's cost."""
