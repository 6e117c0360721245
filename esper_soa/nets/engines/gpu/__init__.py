"""Own GPU kernels for n networks at once, in Triton: the host's block and the convolutional seeds.

No kernel is imported before support.py has said that a device can run it; the same kernels run in Triton's interpreter
on a CPU, which is how they are tested where there is no GPU. The engine in torch holds them as its layers.
"""
