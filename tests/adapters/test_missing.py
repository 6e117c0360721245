"""Without their libraries the adapters say what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "library"),
    [("gymnasium", "gymnasium"), ("sb3", "stable_baselines3"), ("torchrl", "torchrl")],
)
def test_a_missing_library_is_told_with_the_extra_to_install(adapter: str, library: str) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None; import esper_soa.adapters.{adapter}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'esper-soa[envs]'" in done.stderr.splitlines()[-1]
