"""Where the recorded vectors of the reference lie, and how they are read; used by every parity
test.
"""

import os
from pathlib import Path

import numpy as np
import pytest


def vectors_dir() -> Path:
    """Folder of the vectors: ESPER_SOA_VECTORS, or shared/vectors beside the project; skips the
    test without one.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "vectors"
    named = os.environ.get("ESPER_SOA_VECTORS")
    folder = Path(named) if named else beside
    if not folder.is_dir():
        pytest.skip(
            f"no recorded vectors: set ESPER_SOA_VECTORS to their folder (looked in {folder})"
        )
    return folder


def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of `<name>.npz`."""
    with np.load(vectors_dir() / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
