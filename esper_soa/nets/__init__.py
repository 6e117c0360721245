"""N networks at once: hosts, seeds, their training and their data; knows nothing of reinforcement
learning.
"""
