"""The files of a run: its folder, claims on it, checkpoints, policies."""
