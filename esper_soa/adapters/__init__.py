"""The simulator in other libraries (extra `envs`): gymnasium.py, sb3.py, torchrl.py, over flat.py.

Each says, where its library is missing, what to install. Nothing in the package needs any of them.
"""
