"""The simulator in other libraries (extra `envs`): gymnasium.py, sb3.py, torchrl.py, over flat.py.

Each says, where its library is missing, what to install. Nothing in the package needs any of them.
"""

from esper_soa.system.torch_state import package_state

with package_state():  # in which modules are imported that compute
    from esper_soa.simulator import Simulator as Simulator
