"""Says whether the Triton kernels can run on a device, and if not, why; imports neither Triton nor the kernels.

Asked by whoever chooses between the kernels and the plain path, and by the benchmarks, which print the reason.
"""

import importlib.util
import os

import torch

MIN_CAPABILITY = (8, 0)  # tensor cores for bfloat16


def unavailable_reason(device: torch.device) -> str | None:
    """None where the kernels run on `device`, else one sentence that says what is missing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, not {device.type} (TRITON_INTERPRET=1 interprets them for tests)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"the GPU has compute capability {found}, the kernels need {least}"
    return None
