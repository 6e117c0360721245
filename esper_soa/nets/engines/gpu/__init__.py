"""Own GPU kernels for n networks at once, in Triton: the host's block and the convolutional seeds.

Nothing here is imported before support.py has said that a device can run it; the same kernels run in Triton's
interpreter on a CPU, which is how they are tested where there is no GPU.
"""
