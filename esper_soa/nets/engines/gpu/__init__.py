"""The engine of a GPU: N networks by own kernels in Triton, which read on the device what every
network has grown.

engine.py makes passes, training.py and validation.py their fixed lists of launches, and step.py
what they share; blocks.py, slots.py, update.py and newborn.py launch the kernels in kernels/. No
file that needs Triton is imported before support.py has said that a device can run it; Triton's
interpreter runs the same kernels on a CPU, which is how they are tested where there is no GPU.
"""
