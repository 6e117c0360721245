"""Calls of the C kernels with a record each, as records.py and images.py define them."""

import ctypes

from torch.profiler import record_function

from esper_soa.nets.engines.cpu.library import library


def call(kernel: str, record: ctypes.Structure) -> None:
    """Run a kernel on its record, other threads meanwhile; a profiler sees native::`kernel`."""
    with record_function(f"native::{kernel}"):
        if library()[kernel](ctypes.byref(record)):
            raise MemoryError(f"no memory for the scratch of {kernel}")
