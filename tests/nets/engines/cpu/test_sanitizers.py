"""The tests of the native kernels once more, under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m pytest -m slow tests/nets/engines/cpu/test_sanitizers.py

Scratch and the pieces of a network's memory have guards behind them then, and a piece is NaNs until
it is written (vec.h, chain.h), so that a number which nobody wrote shows in the results.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper_soa.nets.engines.cpu import cache, compiler, library

ROOT = Path(__file__).resolve().parents[4]
SANITIZERS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
# Kernels beside kernels, and networks so small that other flags put no value on the other side of a
# ReLU.
TESTS = (
    "tests/nets/engines/cpu/test_engine.py",
    "tests/nets/engines/cpu/test_host_program.py",
    "tests/nets/model/test_transformer.py",
    "-k",
    "to_the_bit or not_finite or right_answers or native_kernels or modules",
)
SECONDS = 3600


def runtime() -> str:
    """Path of the library that has to be loaded before all others; "" where the compiler brings
    none.
    """
    if shutil.which("cc") is None:
        return ""
    said = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return said.stdout.strip() if Path(said.stdout.strip()).is_absolute() else ""


def store_watched(home: Path) -> None:
    """Put a watched library where a process with this cache home finds it; no run would wait for it
    so long.
    """
    wrapper = home / "cc"
    folder = home / "esper_soa"
    wrapper.write_text(f'#!/bin/sh\nexec cc "$@" {SANITIZERS}\n')
    wrapper.chmod(0o700)
    cache.open_folder(folder)
    draft = folder / "draft-watched" / "nets.so"
    draft.parent.mkdir()
    compiler.compile_kernels(
        compiler.identify_compiler([str(wrapper)], draft.parent), draft, timeout=SECONDS
    )
    cache.store(folder, library.library_key(), draft)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_kernels_keep_to_their_own_memory_and_to_defined_behaviour(tmp_path: Path) -> None:
    if not (loaded := runtime()):
        pytest.skip("the C compiler has no libasan.so")
    store_watched(tmp_path)
    watched = {
        "CC": "false",
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": loaded,
        "ASAN_OPTIONS": "detect_leaks=0",  # an interpreter frees little before it ends
    }
    quiet = f"-q -x -n 0 -p no:cacheprovider -o timeout={SECONDS}".split()
    command = [sys.executable, "-m", "pytest", *quiet, *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | watched, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    (used,) = (tmp_path / "esper_soa").glob("*.so")
    assert b"__asan_init" in used.read_bytes()
