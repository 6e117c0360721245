"""N networks at once: hosts, seeds, training and data, without reinforcement learning."""
