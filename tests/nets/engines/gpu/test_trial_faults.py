"""What Triton, its compilers and its launcher raise on a machine that lacks something is a verdict
of the trial, not the end of a run. All of them are the real ones; only the driver launches nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from triton import knobs

BUILDERS = Path(__file__).resolve().parents[3] / "builders"
COMPILER = shutil.which("cc")


def told(
    folder: Path, fault: str, architecture: int = 90, task: str = "small", **environment: str
) -> str:
    """What the trial says of the kernels."""
    command = [str(COMPILER), "-w", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(BUILDERS / "stand_in_driver.c")], check=True)
    known = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    known |= {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(BUILDERS / "try_for_gpu.py"), fault, str(architecture), task],
        env=os.environ | known | {"PYTHONPATH": str(BUILDERS.parents[1])} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def assembler_that_fails(folder: Path) -> str:
    path = folder / "ptxas"
    real = knobs.nvidia.ptxas.path
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real} --version; fi\nexit 1\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("no compiler", "CalledProcessError"),  # gcc, or no Python.h
        ("broken kernel", "CompilationError"),
        ("no assembler", "PTXASError"),
        ("little shared memory", "OutOfResources"),
    ],
)
def test_whatever_compiler_or_launcher_raise_is_a_verdict(
    fault: str, name: str, tmp_path: Path
) -> None:
    environment = {
        "no compiler": {"CC": "false"},
        "no assembler": {"TRITON_PTXAS_PATH": assembler_that_fails(tmp_path)},
        "little shared memory": {"FAKE_SMEM": "16"},
    }.get(fault, {})
    found = told(tmp_path, fault, **environment)
    assert found.startswith(f"triton is left out: it fails with {name}: ")


ALL_LAUNCHED = "its host.momentum is 1.0e+00 from torch"  # as nothing is computed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_with_nothing_amiss_every_launch_gets_through_and_numbers_alone_tell(
    tmp_path: Path,
) -> None:
    assert ALL_LAUNCHED in told(tmp_path, "none")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize(("architecture", "limit"), [(80, 48), (86, 99), (80, 163), (90, 227)])
def test_every_launch_of_wide_hosts_gets_through_with_the_shared_memory_of_every_gpu(
    architecture: int, limit: int, tmp_path: Path
) -> None:
    """Of training, validation and birth, in float32, with up to 128 channels; limit: KiB."""
    memory = str(limit << 10)
    assert ALL_LAUNCHED in told(tmp_path, "none", architecture, "wide", FAKE_SMEM=memory)
