"""The engine of a GPU: N networks by kernels in Triton, which read on the device what every
network has grown.

engine.py makes passes, training.py and validation.py their fixed lists of launches; step.py is the
base of both; blocks.py and slots.py launch kernels of kernels/, whose other files launch theirs. No
file that needs Triton is imported before support.py has said that a device can run it; Triton's
interpreter runs the same kernels on a CPU, which is how they are tested where there is no GPU.
"""
