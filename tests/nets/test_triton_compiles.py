"""The Triton kernels give machine code for GPUs of three generations, on any machine; a table says
what it takes.

The table is made anew by `python -m benchmarks.compiled_kernels 80 90 100 >
benchmarks/results/compiled_kernels.jsonl`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "esper_soa" / "nets" / "engines" / "gpu" / "kernels"
TABLE = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/compiled_kernels.jsonl").read_text().splitlines()
]
ARCHITECTURES = (80, 90, 100)
MOST_SPILLED = 128  # bytes of a thread that registers do not hold


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
        "for unit in range(tl.program_id(0), units, tl.num_programs(0)):"
    ]


def test_the_table_has_every_kernel_for_every_generation_and_they_fit() -> None:
    for architecture in ARCHITECTURES:
        rows = [row for row in TABLE if row["architecture"] == architecture]
        assert {row["kernel"] for row in rows} == kernels()
        assert max(row["spilled_bytes"] for row in rows) <= MOST_SPILLED
        # what a program may have on the smallest of them
        assert max(row["shared"] for row in rows) <= 99 << 10


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
    for row in TABLE:
        assert row["architecture"] != 90 or any(row.items() <= one.items() for one in made)
