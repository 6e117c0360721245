"""What happens in a run by env-step: the tables and events on disk, and what reads them."""
