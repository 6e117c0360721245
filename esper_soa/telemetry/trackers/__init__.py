"""A module per tracker of others, imported where a run asks for it; each has an `open_tracker` for
tracking.py.
"""
