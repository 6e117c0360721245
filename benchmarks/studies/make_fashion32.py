"""Makes fashion32.npz, the embedded data set, from the IDX files of Fashion-MNIST (Debian:
dataset-fashion-mnist).

Run as `python -m benchmarks.studies.make_fashion32 FOLDER OUTPUT`, where FOLDER holds the four .gz
files.
The same input gives the same arrays, drawn and shuffled by a fixed seed.
"""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np

SEED = 32
NUM_CLASSES = 10
TRAIN_PER_CLASS = 500
TEST_PER_CLASS = 100


def read_idx(path: Path) -> np.ndarray:
    """The array of an IDX file: two zero bytes, type 8, number of dimensions, sizes, values."""
    content = gzip.decompress(path.read_bytes())
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zeros != 0 or kind != 8:
        raise SystemExit(f"{path}: not an IDX file of unsigned bytes")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def balanced(labels: np.ndarray, per_class: int, generator: np.random.Generator) -> np.ndarray:
    """Indices of `per_class` random images of every class, in random order."""
    indices = [
        generator.permutation(np.flatnonzero(labels == code))[:per_class]
        for code in range(NUM_CLASSES)
    ]
    return generator.permutation(np.concatenate(indices))


def main(folder: Path, output: Path) -> None:
    """Write train_images, train_labels, test_images, test_labels to `output`."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    arrays: dict[str, np.ndarray] = {}
    parts = (("train", "train", TRAIN_PER_CLASS), ("test", "t10k", TEST_PER_CLASS))
    for part, prefix, per_class in parts:
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        indices = balanced(labels, per_class, generator)
        arrays[f"{part}_images"] = images[indices]
        arrays[f"{part}_labels"] = labels[indices]
    np.savez_compressed(output, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.studies.make_fashion32 FOLDER OUTPUT")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
