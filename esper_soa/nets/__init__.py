"""N networks at once: hosts, seeds, training and data; knows nothing of reinforcement learning."""
