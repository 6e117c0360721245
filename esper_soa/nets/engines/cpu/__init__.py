"""The engine of a CPU: whole networks by kernels in C, their compiler, the proof of them."""
