"""The record of warp instructions says what the kernels of today issue, and that a multiprocessor
holds enough warps of those that count.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [
    json.loads(line)
    for line in (ROOT / "benchmarks/results/gpu_instructions.jsonl").read_text().splitlines()
]
LAST = RECORDS[-1]
COUNTS = {row["kernel"]: row["instructions"] for row in LAST["kernels"]}


def test_every_kernel_that_counts_has_twelve_warps_on_a_multiprocessor() -> None:
    assert LAST["total"] == sum(COUNTS.values())
    many = [row for row in LAST["kernels"] if row["instructions"] > 0.03 * LAST["total"]]
    assert len(many) > 5
    assert min(row["warps"] for row in many) >= 12


def test_no_change_has_made_a_batch_dearer() -> None:
    assert LAST["total"] == min(one["total"] for one in RECORDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_last_record_is_that_of_the_kernels_of_today(tmp_path: Path) -> None:
    """But for another compiler, which may choose other instructions."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_instructions", "--results", ""],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+_kernel) +([\d,]+)", done.stdout, re.MULTILINE)
    counted = {name: int(number.replace(",", "")) for name, number in found}
    assert counted == {name: pytest.approx(number, rel=0.05) for name, number in COUNTS.items()}
