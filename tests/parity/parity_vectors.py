"""Where the recorded vectors of the reference lie, and how they are read."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

SAMPLE = Path(__file__).resolve().parents[1] / "vectors"  # of every clone; see sample.py


def vectors_dir() -> Path:
    """Folder of the vectors: ESPER_SOA_VECTORS, else shared/vectors, else the sample."""
    named = os.environ.get("ESPER_SOA_VECTORS")
    beside = Path(__file__).resolve().parents[3] / "shared" / "vectors"
    return Path(named) if named else beside if beside.is_dir() else SAMPLE


def load_networks(name: str) -> dict:
    """What `<name>.pt` holds; skips the test where it is not part of the sample."""
    path = vectors_dir() / f"{name}.pt"
    if vectors_dir() == SAMPLE and not path.exists():
        pytest.skip(f"{name} is not part of the sample: set ESPER_SOA_VECTORS to all recordings")
    return torch.load(path, weights_only=True)


def columns(names: np.ndarray, values: np.ndarray) -> dict[str, torch.Tensor]:
    """What lies along the last dimension of `values`, by name."""
    return dict(zip(names.tolist(), torch.from_numpy(values).unbind(-1), strict=True))


def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of `<name>.npz`."""
    with np.load(vectors_dir() / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
