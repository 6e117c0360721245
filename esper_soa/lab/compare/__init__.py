"""Variants of settings trained on the same seeds, and what differs."""
