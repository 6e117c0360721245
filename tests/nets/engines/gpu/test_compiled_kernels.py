"""The Triton kernels give machine code for GPUs of three kinds, on any machine, and it fits."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper_soa.nets.engines.gpu.tile_sizes import RESERVED_BYTES

BUILDERS = Path(__file__).resolve().parents[3] / "builders"
KERNELS = BUILDERS.parents[1] / "esper_soa" / "nets" / "engines" / "gpu" / "kernels"
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes that a program can have
REGISTERS = 65536  # of a multiprocessor


def kernels() -> set[str]:
    """Names of all kernels of the package that are launched."""
    sources = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    return set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))


def test_numbers_of_networks_have_64_bits_before_anything_is_multiplied_with_them() -> None:
    """32 are too few for the parameters of some thousand networks; a loop over numbers of images
    alone has no more.
    """
    found = []
    for path in KERNELS.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            places = re.findall(r"tl\.program_id\(0\)(\.to\(tl\.int64\))?", line)
            found += [(line.strip(), wide) for wide in places]
    assert len(found) > 15
    assert [line for line, wide in found if not wide] == [
        "for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), disable_licm=True):"
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
@pytest.mark.parametrize("task", ["baseline", "wide"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", SHARED)
def test_two_programs_of_every_kernel_fit_on_a_multiprocessor_and_no_register_spills(
    architecture: int, dtype: str, task: str, tmp_path: Path
) -> None:
    known = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(BUILDERS / "compiled_kernels.py"), str(architecture), dtype, task],
        env=os.environ | known | {"PYTHONPATH": str(BUILDERS.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == kernels()
    shared = SHARED[architecture]
    for row in rows:
        registers = -(-row["registers"] // 8) * 8
        assert 2 * registers * 32 * row["warps"] <= REGISTERS, row
        assert 2 * (row["shared"] + RESERVED_BYTES) <= shared + RESERVED_BYTES, row
        assert row["spilled_bytes"] == 0, row
