"""A module per tracker of others, imported where a run asks for it, with its `open_tracker`."""
