"""Tables and events of a run by env-step: making, writing, reading them, and trackers."""
