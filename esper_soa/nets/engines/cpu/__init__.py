"""The engine of a CPU: whole networks by kernels in C, what compiles them, and the proof that they
are right.
"""
