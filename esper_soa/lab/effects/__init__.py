"""Effects of single actions, by hosts beside the run that do without one."""
