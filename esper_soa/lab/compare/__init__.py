"""Variants of settings trained in turns on the same seeds, and what differs."""
