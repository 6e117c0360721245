"""Numbers as they once were, by name, in the folder `numbers`. Whoever changes one on purpose runs
the test with ESPER_SOA_RECORD=1, which writes them anew, and looks at what has changed.

A tensor is one number: the sum of its entries, each with a weight of its own, so that entries which
change places are seen, too.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "numbers"
RECORD = "ESPER_SOA_RECORD"


def fingerprint(tensor: Tensor) -> float:
    """The weighted sum; what is no number counts as one that nothing else is."""
    entries = tensor.detach().double().flatten()
    weights = 1 + torch.cos(torch.arange(len(entries), dtype=torch.float64))
    plain = entries.nan_to_num(nan=-7.3, posinf=1e3 / 7, neginf=-1e3 / 7)
    return float((plain * weights).sum() / max(1, len(entries)) ** 0.5)


def fingerprints(records: Mapping[str, object], before: str = "") -> dict[str, float]:
    """Those of every tensor in records within records, by dotted names."""
    found = {}
    for name, part in records.items():
        if isinstance(part, Tensor):
            found[before + name] = fingerprint(part)
        else:
            fields = part._asdict() if hasattr(part, "_asdict") else dict(part.items())
            found |= fingerprints(fields, f"{before}{name}.")
    return found


def assert_recorded(name: str, found: Mapping[str, float], tolerance: float = 1e-6) -> None:
    """Assert that the numbers are those recorded under `name`."""
    path = FOLDER / f"{name}.json"
    if os.environ.get(RECORD):
        rounded = {key: float(f"{number:.9g}") for key, number in found.items()}
        path.write_text(json.dumps(rounded, indent=0) + "\n")
    recorded = json.loads(path.read_text())
    assert list(found) == list(recorded)
    changed = {
        key: f"{recorded[key]} is now {number}"
        for key, number in found.items()
        if number != pytest.approx(recorded[key], rel=tolerance, abs=tolerance)
    }
    assert changed == {}


def assert_recorded_text(name: str, found: str) -> None:
    """Assert that the lines of a text are those recorded under `name`."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get(RECORD):
        path.write_text(found + "\n", encoding="utf-8")
    assert found.splitlines() == path.read_text(encoding="utf-8").splitlines()
