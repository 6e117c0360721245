"""Plugins of esper_soa for Hydra, which imports what is in this namespace whenever a command
starts.

They are quick to import, and can be where what they stand on is not installed.
"""
