"""Draws the sample of the recordings that every clone has, tests/vectors, from the whole of them.

    python tests/parity/sample.py ../shared/vectors ../shared/vectors_text

Takes every so many rows of each recording, of some those that cover most, and a few cases of the
passes of networks.
"""

import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

TARGET = Path(__file__).resolve().parents[1] / "vectors"
ROWS = 240  # of a recording, about
FEW = {
    "gae": 8,
    "slot_lifecycles": 63,
    "alpha_programs": 20,
    "governor": 20,
    "heuristic": 11,
    "features_1slot": 40,
    "features_3slot": 60,
    "features_6slot": 40,
    "masked_categorical": 120,
    "shapley": 20,
}
WHOLE = ("alpha_curves", "alpha_actions", "blueprint_params")
COVERED = {"heuristic": "reason"}  # rows that have all of this, numbers aside, and each often
SEQUENCES = {"normalizers": 6}  # rows that follow from those before: the first ones
CASES = {  # seeds by file; the weights of a seed are in its case of alpha 0
    "host_r0c0_iso1": [("attention", "GATE", 0.0), ("attention", "GATE", 0.3)]
}


def rows_of(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same rows of all arrays of a recording that are as long as its longest group."""
    if name in WHOLE:
        return arrays
    if name in SEQUENCES:
        return {
            key: one if key == "rms_probe" else one[: SEQUENCES[name]]
            for key, one in arrays.items()
        }
    if name in COVERED:
        count = len(arrays[COVERED[name]])
        rows = covering(arrays[COVERED[name]], FEW[name])
        return {key: one[rows] if len(one) == count else one for key, one in arrays.items()}
    lengths = {len(one) for key, one in arrays.items() if one.dtype.kind != "U"}
    step = {length: max(1, length // FEW.get(name, ROWS)) for length in lengths if length >= 100}
    return {key: one[:: step.get(len(one), 1)] for key, one in arrays.items()}


def covering(texts: np.ndarray, count: int) -> list[int]:
    """So many rows of texts [R, T], one by one those that add most of what is rare: pairs of texts
    that follow each other.
    """
    plain = [[re.sub(r"[\d.+-]+", "", str(text)) for text in row] for row in texts]
    kinds = [Counter(pairwise(row)) for row in plain]
    seen = Counter[tuple[str, str]]()
    rows: list[int] = []
    for _ in range(count):
        worth = [sum(1 / (1 + seen[kind]) ** 2 for kind in row) for row in kinds]
        rows.append(max(set(range(len(kinds))) - {*rows}, key=worth.__getitem__))
        seen += kinds[rows[-1]]
    return sorted(rows)


def networks(source: Path) -> None:
    """A few cases of a file of passes, and the fused pass."""
    for name, wanted in CASES.items():
        recorded = torch.load(source / f"{name}.pt", weights_only=True)
        recorded["base"].pop("host_only_eval")
        recorded["cases"] = [
            case
            for case in recorded["cases"]
            if (case["blueprint"], case["algorithm"], round(case["alpha"], 3)) in wanted
        ]
        torch.save(recorded, TARGET / f"{name}.pt")
    torch.save(torch.load(source / "host_fused.pt", weights_only=True), TARGET / "host_fused.pt")


def text(source: Path) -> None:
    """Some cases of text: of a slot, a blueprint with a gate and one without; one fused pass."""
    recorded = torch.load(source / "text_host.pt", weights_only=True)
    kinds = {("attention", "GATE"), ("norm", "MULTIPLY")}
    recorded["cases"] = [
        case
        for case in recorded["cases"]
        if case["slot"] == "r0c1"
        and (case["blueprint"], case["algorithm"]) in kinds
        and case["alpha"] < 0.5
    ]
    recorded["fused"] = recorded["fused"][:1]
    torch.save(recorded, TARGET / "text_host.pt")


def main() -> None:
    """Write the sample."""
    source = Path(sys.argv[1])
    TARGET.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.npz")):
        with np.load(path, allow_pickle=False) as recorded:
            arrays = {key: recorded[key] for key in recorded.files}
        np.savez_compressed(TARGET / path.name, **rows_of(path.stem, arrays))
    networks(source)
    text(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
