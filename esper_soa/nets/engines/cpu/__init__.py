"""The CPU engine: kernels in C for whole networks, their compilation and verification."""
