"""Calls of the C kernels with a record each; used by records.py and images.py, whose records they
are.
"""

import ctypes

from torch.profiler import record_function

from esper_soa.nets.engines.cpu.library import library


def call(kernel: str, record: ctypes.Structure) -> None:
    """Run a kernel on its record; other Python threads go on meanwhile. A profiler sees it as
    native::`kernel`.
    """
    with record_function(f"native::{kernel}"):
        if library()[kernel](ctypes.byref(record)):
            raise MemoryError(f"no memory for the scratch of {kernel}")
