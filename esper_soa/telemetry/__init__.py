"""What happens in a run, env-step by env-step: the tables and events on disk, and what reads
them.
"""
