"""The Triton kernels give machine code for an H100, on any machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
]
KERNELS = {
    "conv_kernel", "statistics_kernel", "norm_pool_kernel", "norm_sums_kernel", "coefficients_kernel",
    "input_gradient_kernel", "weight_gradient_kernel", "evaluation_kernel", "seed_forward_kernel",
    "seed_backward_kernel",
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kernel_compiles_for_an_h100(dtype: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script), dtype], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == KERNELS
