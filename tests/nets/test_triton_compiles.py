"""The Triton kernels give machine code for GPUs of three kinds, on any machine; a table says
what it takes.

The table is made anew by `python -m benchmarks.compiled_kernels 90 86 80 --dtype bfloat16 float32
--task baseline wide`, once with each version of Triton, one behind the other in
benchmarks/results/compiled_kernels.jsonl.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from esper_soa.nets.engines.gpu.tile_sizes import RESERVED

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "esper_soa" / "nets" / "engines" / "gpu" / "kernels"
TABLE = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/compiled_kernels.jsonl").read_text().splitlines()
]
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes that a program can have
REGISTERS = 65536  # of a multiprocessor
PLACES = ("architecture", "dtype", "task", "triton")
CONFIGURATIONS = list(
    product(SHARED, ("bfloat16", "float32"), ("baseline", "wide"), ("3.6.0", "3.7.1"))
)


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


@pytest.mark.parametrize("place", CONFIGURATIONS)
def test_the_table_has_every_kernel_and_two_programs_of_each_fit(
    place: tuple[int, str, str, str],
) -> None:
    rows = [row for row in TABLE if tuple(row[name] for name in PLACES) == place]
    shared = SHARED[place[0]]
    assert {row["kernel"] for row in rows} == kernels()
    assert len(rows) > len(kernels())  # all variants
    for row in rows:
        registers = -(-row["registers"] // 8) * 8
        assert 2 * registers * 32 * row["warps"] <= REGISTERS
        assert 2 * (row["shared"] + RESERVED) <= shared + RESERVED


def test_registers_hold_all_that_threads_need() -> None:
    assert [row for row in TABLE if row["spilled_bytes"]] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
def test_every_kernel_compiles_to_what_the_table_says(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiled_kernels", "90"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    places = [tuple(row[name] for name in PLACES) for row in made]
    known = [row for row in TABLE if tuple(row[name] for name in PLACES) in places]
    assert made == known
