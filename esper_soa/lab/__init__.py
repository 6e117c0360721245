"""What looks at runs and organises many of them; the core does without it."""
